-- Makes the store hold, of one owner's tenants, exactly what that owner declares; all or nothing.
-- KEYS  1 name -> record   2 key's SHA-256 -> name   3 version
-- ARGV  1 the owner   2 JSON: [{"name": ..., "record": ..., "keys": [...]}, ...]
-- Gives {"ok", version, added, changed, removed}, or {"owned", name, its owner}, {"double", name, other name}.
local tenants_key, keys_key, version_key = KEYS[1], KEYS[2], KEYS[3]
local owner, declared = ARGV[1], cjson.decode(ARGV[2])

local function pairs_of(hash)
  local flat, map = redis.call('HGETALL', hash), {}
  for i = 1, #flat, 2 do map[flat[i]] = flat[i + 1] end
  return map
end

local function owner_of(record)
  local readable, value = pcall(cjson.decode, record)
  return readable and type(value) == 'table' and value.owner or '?'
end

-- 1. What is there, and whose.
local records, name_of_key = pairs_of(tenants_key), pairs_of(keys_key)
local mine = {}
for name, record in pairs(records) do
  if owner_of(record) == owner then mine[name] = true end
end

-- 2. Refuse before anything is written.
local new_name_of_key, wanted = {}, {}
for _, tenant in ipairs(declared) do
  local name = tenant.name
  if records[name] and not mine[name] then return {'owned', name, owner_of(records[name])} end
  wanted[name] = true
  for _, key in ipairs(tenant.keys) do
    local twin, holder = new_name_of_key[key], name_of_key[key]
    if twin and twin ~= name then return {'double', name, twin} end
    if holder and records[holder] and not mine[holder] then return {'double', name, holder} end
    new_name_of_key[key] = name
  end
end

-- 3. Write what differs.
local added, changed, removed, touched = 0, 0, 0, {}
for key, name in pairs(name_of_key) do
  if mine[name] and new_name_of_key[key] ~= name then
    redis.call('HDEL', keys_key, key)
    touched[name] = true
  end
end
for key, name in pairs(new_name_of_key) do
  if name_of_key[key] ~= name then
    redis.call('HSET', keys_key, key, name)
    touched[name] = true
  end
end
for _, tenant in ipairs(declared) do
  local name = tenant.name
  if records[name] ~= tenant.record then
    redis.call('HSET', tenants_key, name, tenant.record)
    touched[name] = true
  end
  if not records[name] then added = added + 1 elseif touched[name] then changed = changed + 1 end
end
for name in pairs(mine) do
  if not wanted[name] then
    redis.call('HDEL', tenants_key, name)
    removed = removed + 1
  end
end

-- 4. Tell the gates.
local version = tonumber(redis.call('GET', version_key) or '0')
if added + changed + removed > 0 then version = redis.call('INCR', version_key) end
return {'ok', version, added, changed, removed}
