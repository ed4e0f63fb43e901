-- What every step begins with: the keys, the state, records and the minute. fair.lua, line.lua and holding.lua follow,
-- then a step's own file.
-- KEYS 1 the engine's prefix, with a hash tag: every key begins with it.
-- ARGV 1 the step's arguments, JSON. Times are milliseconds of the server's clock.
-- A step gives JSON: what it found, with "now", "retry" (ms until a slot is likely free), "tally" (sequences held now and
-- granted since the ledger was made), "granted" (ids) and "freed" (what was given back, for the bill).
--
-- Records are JSON and keep members that this version does not know. Every step's work grows with the logarithm of
-- the queue, or with the number of those whom it lets in or sends away; only `view` and a new pool look at everybody.
local LAYOUT = '2'
local STEP_MS, STEPS = 5000, 12
local CLAIM_MS = 1000
local HOLD_SMOOTHING = 0.2
local DROPPED_MAX = 500 -- of a lost gate's tickets in one step
local STREAM_MAX = 1000
local MILLI = 1000
local PPM, NEARLY_PPM = 1000000, 10000
local LOOK_PAST, LOOK_FIRST, LOOK_NEXT = 1000, 16, 128
local VOIDS = {'bypass', 'tiers', 'quota', 'cache_discount'}

local base, ask = KEYS[1], cjson.decode(ARGV[1])
local now = now_ms()
local key = {
  state = base .. ':state', --       hash: the pool, the sums, the sequence number of the last ticket
  leases = base .. ':leases', --     hash: id -> what is held
  tickets = base .. ':tickets', --   hash: id -> who waits
  queue = base .. ':queue', --       zset by name: tenant NUL ticket's number NUL id
  heads = base .. ':heads', --       zset: first tickets that are inside their tenant's Quota, by its counter
  spot = base .. ':spot', --         zset: the same of spot tenants
  heads_cells = base .. ':heads_cells', -- zset: those of heads by the cells that they need
  spot_cells = base .. ':spot_cells', --   zset: the same of spot
  owners = base .. ':owners', --     zset: those of heads that are inside what is guaranteed to their tenant
  away = base .. ':away', --         zset: tenants that neither hold nor wait, by counter
  tenants = base .. ':tenants', --   hash: tenant -> its sums, its counter, and its minute
  ends = base .. ':ends', --         zset: running leases by when they expire
  draining = base .. ':draining', -- zset: draining leases by since when
  gates = base .. ':gates', --       zset: gates by when they count as lost
  of_gate = base .. ':of_gate', --   zset by name: gate NUL id of a ticket
}

-- State and records

local state, state_changed = {}, {}
do
  local flat = redis.call('HGETALL', key.state)
  for i = 1, #flat, 2 do state[flat[i]] = flat[i + 1] end
end
local taking_over = state.layout == '1' and ask.ttl ~= nil -- a gate of this version joins what one before it left
if state.layout and state.layout ~= LAYOUT and not taking_over then return cjson.encode({layout = state.layout}) end
if not state.pool and not ask.pool then return cjson.encode({unset = true, now = now}) end
local pool = state.pool and cjson.decode(state.pool)
local rule = state.rule and cjson.decode(state.rule)
  or {input = 1000, cached = 250, output = 2000, bypass_max = 4, lent_max = 512}

local function num(name) return tonumber(state[name] or '') or 0 end
local function set(name, value)
  state[name] = type(value) == 'number' and string.format('%.17g', value) or value
  state_changed[name] = true
end
local function add(name, amount)
  if amount ~= 0 then set(name, num(name) + amount) end
end
local function clear(name)
  if state[name] and state[name] ~= '' then set(name, '') end
end
local function text(name) return state[name] ~= '' and state[name] or nil end

local function record(hash, id)
  local found = redis.call('HGET', hash, id)
  return found and cjson.decode(found)
end
local function keep(hash, id, value) redis.call('HSET', hash, id, cjson.encode(value)) end

local tenants, tenant_changed = {}, {}
local function tenant(name)
  if not tenants[name] then tenants[name] = record(key.tenants, name) or {} end
  return tenants[name]
end
local function tenant_set(name, field, value)
  if tenant(name)[field] ~= value then
    tenants[name][field] = value
    tenant_changed[name] = true
  end
end
local function tenant_add(name, field, amount)
  local sum = (tenant(name)[field] or 0) + amount
  tenants[name][field] = sum ~= 0 and sum or nil
  tenant_changed[name] = true
end

local granted, freed = {}, {}
local function push(gate, field, id)
  local stream = base .. ':to:' .. gate
  redis.call('XADD', stream, 'MAXLEN', '~', STREAM_MAX, '*', field, id)
  redis.call('PEXPIRE', stream, num('ttl') * 4)
end

-- The minute (core/minute.py)

local function minute(name, kind)
  local counts, total = tenant(name)[kind] or {}, 0
  local oldest = math.floor(now / STEP_MS) - STEPS
  for step, count in pairs(counts) do
    if tonumber(step) < oldest then
      counts[step] = nil
      tenant_changed[name] = true
    else
      total = total + count
    end
  end
  if not next(counts) then tenant(name)[kind] = nil end
  return counts, total
end

local function minute_wait(name, kind, amount, most)
  if not most then return 0 end
  local counts, total = minute(name, kind)
  if total == 0 or total + amount <= most then return 0 end
  local excess, steps = math.min(total + amount - most, total), {}
  for step in pairs(counts) do steps[#steps + 1] = tonumber(step) end
  table.sort(steps)
  for _, step in ipairs(steps) do
    excess = excess - counts[string.format('%d', step)]
    if excess <= 0 then return (step + STEPS + 1) * STEP_MS - now end
  end
end

local function minute_add(name, kind, step, amount, only_there)
  if amount == 0 then return end
  local one = tenant(name)
  local counts, field = one[kind] or {}, string.format('%d', step)
  if only_there and not counts[field] then return end
  local sum = (counts[field] or 0) + amount
  counts[field] = sum > 0 and sum or nil
  one[kind] = next(counts) and counts or nil
  tenant_changed[name] = true
end

local function charge(ticket, sign)
  minute_add(ticket.tenant, 'requests', ticket.step, sign * ticket.requests, sign < 0)
  minute_add(ticket.tenant, 'tokens', ticket.step, sign * ticket.tokens, sign < 0)
end
