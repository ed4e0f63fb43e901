-- Removes one tenant and all its keys, on behalf of the owner that declares it.
-- KEYS  1 name -> record   2 key's SHA-256 -> name   3 minted key's SHA-256 -> what is known of it   4 version
-- ARGV  1 the name   2 the owner
-- Gives {"ok", version, its record, revoked}, where revoked is SHA-256, what is known of it or "", ...; or {"unknown"},
-- or {"owned", its owner}.
local tenants_key, keys_key, minted_key, version_key = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local name, owner = ARGV[1], ARGV[2]

local record = redis.call('HGET', tenants_key, name)
if not record then return {'unknown'} end
local readable, value = pcall(cjson.decode, record)
local found = readable and type(value) == 'table' and value.owner or '?'
if found ~= owner then return {'owned', found} end

local flat, revoked = redis.call('HGETALL', keys_key), {}
for i = 1, #flat, 2 do
  if flat[i + 1] == name then
    revoked[#revoked + 1] = flat[i]
    revoked[#revoked + 1] = redis.call('HGET', minted_key, flat[i]) or ''
    redis.call('HDEL', keys_key, flat[i])
    redis.call('HDEL', minted_key, flat[i])
  end
end
redis.call('HDEL', tenants_key, name)
return {'ok', redis.call('INCR', version_key), record, revoked}
