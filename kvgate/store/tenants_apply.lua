-- Makes the store hold, of one owner's tenants, exactly what that owner declares; all or nothing.
-- A tenant declared with "keys" has these keys and no others. One declared without keeps the keys that were minted
-- for it, and loses those that its owner had declared.
-- KEYS  1 name -> record   2 key's SHA-256 -> name   3 minted key's SHA-256 -> what is known of it   4 version
-- ARGV  1 the owner   2 JSON: [{"name": ..., "record": ..., "keys": [...]}, ...]   3 "write", or "plan": only tell
-- Gives {"ok", version, tenants, revoked, granted}, of which
--   tenants  name, record before, record after, ... of those that change; "" where there was, or will be, none
--   revoked  SHA-256, name, what is known of it or "", ...      granted  SHA-256, name, ...
-- or {"owned", name, its owner}, {"double", name, other name}, {"over", name, guaranteed ratio, ...} of all who have one.
local tenants_key, keys_key, minted_key, version_key = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local owner, declared, writes = ARGV[1], cjson.decode(ARGV[2]), ARGV[3] == 'write'

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
local records, name_of_key, minted = pairs_of(tenants_key), pairs_of(keys_key), pairs_of(minted_key)
local mine, wanted = {}, {}
for name, record in pairs(records) do
  if owner_of(record) == owner then mine[name] = true end
end
for _, tenant in ipairs(declared) do wanted[tenant.name] = tenant end

local function is_kept(key, holder)
  return not mine[holder] or (wanted[holder] and not wanted[holder].keys and minted[key])
end

-- 2. Refuse before anything is written.
local new_name_of_key = {}
for _, tenant in ipairs(declared) do
  local name = tenant.name
  if records[name] and not mine[name] then return {'owned', name, owner_of(records[name])} end
  for _, key in ipairs(tenant.keys or {}) do
    local twin, holder = new_name_of_key[key], name_of_key[key]
    if twin and twin ~= name then return {'double', name, twin} end
    if holder and records[holder] and is_kept(key, holder) then return {'double', name, holder} end
    new_name_of_key[key] = name
  end
end

local total, guaranteed = 0, {}
local function count(name, record)
  local readable, value = pcall(cjson.decode, record)
  local share = readable and type(value) == 'table' and type(value.tenant) == 'table' and value.tenant.share
  local ratio = type(share) == 'table' and tonumber(share.guaranteed_ratio) or 0
  if ratio > 0 then
    total = total + ratio
    guaranteed[#guaranteed + 1] = name
    guaranteed[#guaranteed + 1] = string.format('%.9g', ratio)
  end
end
for name, record in pairs(records) do
  if not mine[name] then count(name, record) end
end
for _, tenant in ipairs(declared) do count(tenant.name, tenant.record) end
if total > 1 + 1e-9 then return {'over', unpack(guaranteed)} end

-- 3. What differs.
local tenants, revoked, granted, touched = {}, {}, {}, {}
for key, name in pairs(name_of_key) do
  if mine[name] and new_name_of_key[key] ~= name and not is_kept(key, name) then
    touched[name] = true
    for _, value in ipairs({key, name, minted[key] or ''}) do revoked[#revoked + 1] = value end
  end
end
for key, name in pairs(new_name_of_key) do
  if name_of_key[key] ~= name then
    touched[name] = true
    for _, value in ipairs({key, name}) do granted[#granted + 1] = value end
  end
end
for name, tenant in pairs(wanted) do
  if touched[name] or records[name] ~= tenant.record then
    for _, value in ipairs({name, records[name] or '', tenant.record}) do tenants[#tenants + 1] = value end
  end
end
for name in pairs(mine) do
  if not wanted[name] then
    for _, value in ipairs({name, records[name], ''}) do tenants[#tenants + 1] = value end
  end
end

-- 4. Write it, and tell the gates.
local version = tonumber(redis.call('GET', version_key) or '0')
if writes and #tenants > 0 then
  for i = 1, #revoked, 3 do redis.call('HDEL', keys_key, revoked[i]) end
  for i = 1, #granted, 2 do redis.call('HSET', keys_key, granted[i], granted[i + 1]) end
  for i = 1, #revoked, 3 do redis.call('HDEL', minted_key, revoked[i]) end
  for key in pairs(new_name_of_key) do redis.call('HDEL', minted_key, key) end
  for i = 1, #tenants, 3 do
    if tenants[i + 2] == '' then
      redis.call('HDEL', tenants_key, tenants[i])
    else
      redis.call('HSET', tenants_key, tenants[i], tenants[i + 2])
    end
  end
  version = redis.call('INCR', version_key)
end
return {'ok', version, tenants, revoked, granted}
