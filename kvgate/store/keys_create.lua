-- Gives a tenant one key more, where the tenant's keys are made here.
-- KEYS  1 name -> record   2 key's SHA-256 -> name   3 minted key's SHA-256 -> what is known of it   4 version
-- ARGV  1 the tenant's name   2 the key's SHA-256   3 a label   4 who makes it
-- Gives {"ok", version, what is known of it}, or {"unknown"}, {"declared", the tenant's owner}, {"taken"}.
local tenants_key, keys_key, minted_key, version_key = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local name, key = ARGV[1], ARGV[2]

local record = redis.call('HGET', tenants_key, name)
if not record then return {'unknown'} end
local readable, value = pcall(cjson.decode, record)
if not readable or type(value) ~= 'table' or value.keys_declared ~= false then
  return {'declared', readable and type(value) == 'table' and value.owner or '?'}
end
if redis.call('HEXISTS', keys_key, key) == 1 then return {'taken'} end

local now_s = tonumber(redis.call('TIME')[1])
local known = cjson.encode({label = ARGV[3], created_s = now_s, created_by = ARGV[4]})
redis.call('HSET', keys_key, key, name)
redis.call('HSET', minted_key, key, known)
return {'ok', redis.call('INCR', version_key), known}
