-- Revokes the one minted key whose SHA-256 begins with some digits.
-- KEYS  1 name -> record   2 key's SHA-256 -> name   3 minted key's SHA-256 -> what is known of it   4 version
-- ARGV  1 the first digits of the SHA-256
-- Gives {"ok", version, SHA-256, name, what is known of it}, or {"unknown"}, {"ambiguous", SHA-256, ...},
-- {"declared", SHA-256, name, its tenant's owner}.
local tenants_key, keys_key, minted_key, version_key = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local digits = ARGV[1]

local found = {}
for _, key in ipairs(redis.call('HKEYS', keys_key)) do
  if string.sub(key, 1, #digits) == digits then found[#found + 1] = key end
end
if #found == 0 then return {'unknown'} end
if #found > 1 then return {'ambiguous', unpack(found, 1, 20)} end

local key = found[1]
local name, known = redis.call('HGET', keys_key, key), redis.call('HGET', minted_key, key)
local record = redis.call('HGET', tenants_key, name)
if record and not known then
  local readable, value = pcall(cjson.decode, record)
  return {'declared', key, name, readable and type(value) == 'table' and value.owner or '?'}
end
redis.call('HDEL', keys_key, key)
redis.call('HDEL', minted_key, key)
return {'ok', redis.call('INCR', version_key), key, name, known or ''}
