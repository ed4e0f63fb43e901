-- What every step begins with: the keys, the state, and the rule of core/ledger.py. A step's file follows.
-- KEYS 1 the engine's prefix, with a hash tag: every key begins with it.
-- ARGV 1 the step's arguments, JSON. Times are milliseconds of the server's clock.
-- A step gives JSON: what it found, with "now", "retry" (ms until a slot is likely free), "tally" (sequences held now and
-- granted since the ledger was made) and "granted" (ids).
--
-- Records are JSON and keep members that this version does not know. Every step's work grows with the logarithm of
-- the queue, or with the number of those whom it lets in or sends away; only `view` and a new pool look at everybody.
local LAYOUT = '1'
local STEP_MS, STEPS = 5000, 12
local CLAIM_MS = 1000
local HOLD_SMOOTHING = 0.2
local DROPPED_MAX = 500 -- of a lost gate's tickets in one step
local STREAM_MAX = 1000

local base, ask = KEYS[1], cjson.decode(ARGV[1])
local now = now_ms()
local key = {
  state = base .. ':state', --       hash: the pool, the sums, the sequence number of the last ticket
  leases = base .. ':leases', --     hash: id -> what is held
  tickets = base .. ':tickets', --   hash: id -> who waits
  queue = base .. ':queue', --       zset by name: tenant NUL ticket's number NUL id
  heads = base .. ':heads', --       zset: tenants whose first ticket is inside their Quota, by what goes first
  tenants = base .. ':tenants', --   hash: tenant -> its sums, and its minute
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
if state.layout and state.layout ~= LAYOUT then return cjson.encode({layout = state.layout}) end
if not state.pool and not ask.pool then return cjson.encode({unset = true, now = now}) end
local pool = state.pool and cjson.decode(state.pool)

local function num(name) return tonumber(state[name] or '0') end
local function set(name, value)
  state[name] = type(value) == 'number' and string.format('%.17g', value) or value
  state_changed[name] = true
end
local function add(name, amount) set(name, num(name) + amount) end

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
local function tenant_add(name, field, amount)
  local one = tenant(name)
  local sum = (one[field] or 0) + amount
  one[field] = sum ~= 0 and sum or nil
  tenant_changed[name] = true
end

local granted = {}
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

-- What fits (core/pool.py, core/ledger.py)

local function cells(size)
  local copies = pool.prompt_shared and 1 or math.floor(size.sequences / size.prompts)
  return size.sequences * (size.output + pool.margin) + size.prompt_sum * copies
end

local function can_ever_fit(size)
  return size.prompt + size.output + pool.margin <= pool.tokens_per_slot
    and size.sequences <= pool.slots
    and cells(size) <= pool.tokens - pool.headroom
end

local closed = false
local function fits(size)
  return not closed
    and num('sequences') + size.sequences <= pool.slots
    and num('cells') + cells(size) <= pool.tokens - pool.headroom
end

local function inside_quota(one)
  local mine, quota = tenant(one.tenant), one.quota
  local sequences = (mine.running or 0) + (mine.draining or 0) + one.size.sequences
  return (not quota.concurrency_max or sequences <= quota.concurrency_max)
    and (not quota.kv_tokens_max or (mine.cells or 0) + cells(one.size) <= quota.kv_tokens_max)
end

local function retry_ms() return num('hold') * (1 + num('waiting') / pool.slots) end

-- The queue

local function place(one, id) return one.tenant .. '\0' .. string.format('%016d', one.number) .. '\0' .. id end

local function head_of(name)
  local first = redis.call('ZRANGEBYLEX', key.queue, '[' .. name .. '\0', '(' .. name .. '\1', 'LIMIT', 0, 1)[1]
  return first and first:sub(#name + 19)
end

local function refresh_head(name)
  local id = head_of(name)
  local ticket = id and record(key.tickets, id)
  if ticket and inside_quota(ticket) then
    redis.call('ZADD', key.heads, ticket.number, name)
  else
    redis.call('ZREM', key.heads, name)
  end
end

local function leave_queue(id, ticket)
  redis.call('HDEL', key.tickets, id)
  redis.call('ZREM', key.queue, place(ticket, id))
  redis.call('ZREM', key.of_gate, ticket.gate .. '\0' .. id)
  add('waiting', -1)
  tenant_add(ticket.tenant, 'waiting', -1)
end

local function withdraw(id)
  local ticket = record(key.tickets, id)
  if not ticket then return false end
  leave_queue(id, ticket)
  charge(ticket, -1)
  refresh_head(ticket.tenant)
  return true
end

-- Take, drain, free

local function take(id, ticket, claimed)
  local lease = ticket
  lease.cells, lease.granted, lease.claimed = lease.cells or cells(ticket.size), now, claimed
  keep(key.leases, id, lease)
  redis.call('ZADD', key.ends, now + (claimed and num('ttl') or CLAIM_MS), id)
  add('sequences', lease.size.sequences)
  add('granted', lease.size.sequences)
  add('cells', lease.cells)
  tenant_add(lease.tenant, 'running', lease.size.sequences)
  tenant_add(lease.tenant, 'cells', lease.cells)
  refresh_head(lease.tenant)
  return lease
end

local function give_back(id, lease)
  redis.call('HDEL', key.leases, id)
  redis.call('ZREM', key.ends, id)
  redis.call('ZREM', key.draining, id)
  add('sequences', -lease.size.sequences)
  add('cells', -lease.cells)
  tenant_add(lease.tenant, lease.since and 'draining' or 'running', -lease.size.sequences)
  tenant_add(lease.tenant, 'cells', -lease.cells)
  refresh_head(lease.tenant)
end

local function free(id, lease)
  set('hold', num('hold') + HOLD_SMOOTHING * (now - lease.granted - num('hold')))
  give_back(id, lease)
end

local function drain(id, lease, lost)
  tenant_add(lease.tenant, 'running', -lease.size.sequences)
  tenant_add(lease.tenant, 'draining', lease.size.sequences)
  lease.since, lease.handed, lease.lost = now, lease.handed or now, lost
  keep(key.leases, id, lease)
  redis.call('ZREM', key.ends, id)
  redis.call('ZADD', key.draining, now, id)
  for _, gate in ipairs(redis.call('ZRANGE', key.gates, 0, -1)) do push(gate, 'drains', id) end
end

local function claim(id, lease)
  lease.claimed = true
  keep(key.leases, id, lease)
  redis.call('ZADD', key.ends, now + num('ttl'), id)
end

-- What a gate tells of its lease comes as ages, so that what is late looks later: always the careful side.
local function tell(lease, told)
  if told.handed_age then lease.handed = math.max(now - told.handed_age, lease.handed or 0) end
  if told.answered_age then lease.answered = math.min(now - told.answered_age, lease.answered or now) end
end

local function promote()
  while true do
    local name = redis.call('ZRANGE', key.heads, 0, 0)[1]
    local id = name and head_of(name)
    local ticket = id and record(key.tickets, id)
    if not ticket or not fits(ticket.size) then return end
    leave_queue(id, ticket)
    take(id, ticket, false)
    granted[#granted + 1] = id
    push(ticket.gate, 'granted', id)
  end
end

-- What time has brought: grants unclaimed, leases expired, gates lost, drains overdue; in this order.
local function sweep()
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', key.ends, '-inf', now)) do
    local lease = record(key.leases, id)
    if lease.claimed then
      drain(id, lease, true)
      add('expired', 1)
    else
      charge(lease, -1)
      give_back(id, lease)
    end
  end
  for _, gate in ipairs(redis.call('ZRANGEBYSCORE', key.gates, '-inf', now)) do
    local its = redis.call(
      'ZRANGEBYLEX', key.of_gate, '[' .. gate .. '\0', '(' .. gate .. '\1', 'LIMIT', 0, DROPPED_MAX
    )
    for _, member in ipairs(its) do withdraw(member:sub(#gate + 2)) end
    if #its < DROPPED_MAX then
      redis.call('ZREM', key.gates, gate)
      redis.call('DEL', base .. ':to:' .. gate)
    end
  end
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', key.draining, '-inf', now - num('drain_max'))) do
    free(id, record(key.leases, id))
    add('overdue', 1)
  end
  local first = redis.call('ZRANGE', key.gates, 0, 0, 'WITHSCORES')[2]
  local heard_of = state.closed_since and (not first or tonumber(first) >= num('closed_since') + num('ttl'))
  closed = now < num('closed_until') and not heard_of
  promote()
end

local function resize(new)
  pool = new
  set('pool', cjson.encode(new))
  local lost, names = {}, {}
  for _, member in ipairs(redis.call('ZRANGE', key.queue, 0, -1)) do
    local name = member:sub(1, member:find('\0', 1, true) - 1)
    local id = member:sub(#name + 19)
    local ticket = record(key.tickets, id)
    names[name] = true
    if not can_ever_fit(ticket.size) then lost[#lost + 1] = {id = id, ticket = ticket} end
  end
  table.sort(lost, function(a, b) return a.ticket.number < b.ticket.number end)
  for _, one in ipairs(lost) do
    withdraw(one.id)
    push(one.ticket.gate, 'changed', one.id)
  end
  for name in pairs(names) do refresh_head(name) end
  promote()
end

local function lease_told(id, lease)
  return {id = id, cells = lease.cells, sequences = lease.size.sequences, queued = lease.granted - lease.asked}
end

local function answer(found)
  local flat = {}
  for name in pairs(state_changed) do
    flat[#flat + 1] = name
    flat[#flat + 1] = state[name]
  end
  if #flat > 0 then redis.call('HSET', key.state, unpack(flat)) end
  for name in pairs(tenant_changed) do
    if next(tenants[name]) then
      keep(key.tenants, name, tenants[name])
    else
      redis.call('HDEL', key.tenants, name)
    end
  end
  found.now, found.retry = now, retry_ms()
  found.tally = {held = num('sequences'), granted = num('granted')}
  if #granted > 0 then found.granted = granted end
  return cjson.encode(found)
end
