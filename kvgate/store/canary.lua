-- Changes who may have prefix reuse, and keeps the history of it.
--
-- KEYS: pins (hash from process to pin), widened (set of tenants), reports (list), events (list),
--       doubted (set of fingerprints that reused although told not to, since the suite last passed there)
-- ARGV: report REPORT REPORTS_MAX EVENTS_MAX | pin PIN PINS_MAX EVENTS_MAX RENEW | unpin FINGERPRINT INSTANCE BY WHY
--       EVENTS_MAX DOUBT | widen TENANTS BY EVENTS_MAX | narrow TENANTS BY EVENTS_MAX; RENEW and DOUBT: 1 or empty
-- Returns the moment of a pin in Unix time, or why there is none: doubted, unpinned; else how many pins or tenants changed.
local pins_key, widened_key, reports_key, events_key, doubted_key = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local what = ARGV[1]
local time = redis.call('TIME')
local now_s = tonumber(time[1]) + tonumber(time[2]) / 1e6
local moment = string.format('%.3f', now_s)

local function tell(subject, by, why, kept)
  local event = { what = what, subject = subject, at_s = now_s, by = by, why = why }
  redis.call('LPUSH', events_key, cjson.encode(event))
  redis.call('LTRIM', events_key, 0, kept - 1)
end

-- Takes away the pins of an engine, of one process where `instance` is not empty.
local function unpin(fingerprint, instance)
  local gone, flat = 0, redis.call('HGETALL', pins_key)
  for i = 1, #flat, 2 do
    local readable, pin = pcall(cjson.decode, flat[i + 1])
    if not readable or (pin.fingerprint == fingerprint and (instance == '' or pin.instance == instance)) then
      redis.call('HDEL', pins_key, flat[i])
      gone = gone + 1
    end
  end
  return gone
end

-- Whether any process of this engine is pinned.
local function is_pinned(fingerprint)
  for _, text in ipairs(redis.call('HVALS', pins_key)) do
    local readable, pin = pcall(cjson.decode, text)
    if readable and pin.fingerprint == fingerprint then return true end
  end
  return false
end

-- Drops the oldest pins beyond the last `kept`.
local function trim(kept)
  local flat, found = redis.call('HGETALL', pins_key), {}
  for i = 1, #flat, 2 do
    local readable, pin = pcall(cjson.decode, flat[i + 1])
    found[#found + 1] = { name = flat[i], at_s = readable and tonumber(pin.pinned_at_s) or 0 }
  end
  table.sort(found, function(a, b) return a.at_s > b.at_s end)
  for i = kept + 1, #found do redis.call('HDEL', pins_key, found[i].name) end
end

if what == 'report' then
  local report = cjson.decode(ARGV[2])
  redis.call('LPUSH', reports_key, ARGV[2])
  redis.call('LTRIM', reports_key, 0, tonumber(ARGV[3]) - 1)
  if report.passed then
    redis.call('SREM', doubted_key, report.fingerprint)
    return 0
  end
  local gone = unpin(report.fingerprint, '')
  if gone > 0 then
    what = 'unpin'
    tell(report.fingerprint, 'kvgate canary', 'the suite failed', tonumber(ARGV[4]))
  end
  return gone
elseif what == 'pin' then
  local pin = cjson.decode(ARGV[2])
  if redis.call('SISMEMBER', doubted_key, pin.fingerprint) == 1 then return 'doubted' end
  if ARGV[5] == '1' and not is_pinned(pin.fingerprint) then return 'unpinned' end
  pin.pinned_at_s = now_s
  redis.call('HSET', pins_key, pin.fingerprint .. ' ' .. pin.instance, cjson.encode(pin))
  trim(tonumber(ARGV[3]))
  tell(pin.fingerprint, pin.by, '', tonumber(ARGV[4]))
  return moment
elseif what == 'unpin' then
  local gone = unpin(ARGV[2], ARGV[3])
  if ARGV[7] == '1' then redis.call('SADD', doubted_key, ARGV[2]) end
  if gone > 0 then tell(ARGV[2], ARGV[4], ARGV[5], tonumber(ARGV[6])) end
  return gone
end

local changed = 0
for _, tenant in ipairs(cjson.decode(ARGV[2])) do
  local done = redis.call(what == 'widen' and 'SADD' or 'SREM', widened_key, tenant)
  if done == 1 then
    changed = changed + 1
    tell(tenant, ARGV[3], '', tonumber(ARGV[4]))
  end
end
return changed
