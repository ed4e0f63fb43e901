-- What is held: who waits is let in, leases are taken, drained and freed, and a step ends (core/ledger.py).

local function leave_queue(id, ticket)
  redis.call('HDEL', key.tickets, id)
  redis.call('ZREM', key.queue, place_in_queue(ticket, id))
  redis.call('ZREM', key.of_gate, ticket.gate .. '\0' .. id)
  add('waiting', -1)
  tenant_add(ticket.tenant, 'waiting', -1)
end

local function withdraw(id)
  local ticket = record(key.tickets, id)
  if not ticket then return false end
  leave_queue(id, ticket)
  charge(ticket, -1)
  stand(ticket.tenant)
  return true
end

local function take(id, ticket, claimed)
  local lease = ticket
  lease.cells, lease.granted, lease.claimed = lease.cells or cells(ticket.size), now, claimed
  lease.prefill = lease.size.prompt_sum
  add('sequences', lease.size.sequences)
  add('granted', lease.size.sequences)
  add('cells', lease.cells)
  add('prefill', lease.prefill)
  hold(lease.tenant, 'running', lease, 1)
  tenant_set(lease.tenant, 'weight', lease.weight)
  if next(parts) or lease.spot then void('tiers') end
  charge_service(lease, lease.size.prompt_sum, 0, 0)
  keep(key.leases, id, lease)
  redis.call('ZADD', key.ends, now + (claimed and num('ttl') or CLAIM_MS), id)
  stand(lease.tenant)
  return lease
end

local function give_back(id, lease)
  redis.call('HDEL', key.leases, id)
  redis.call('ZREM', key.ends, id)
  redis.call('ZREM', key.draining, id)
  add('sequences', -lease.size.sequences)
  add('cells', -lease.cells)
  add('prefill', -(lease.prefill or 0))
  hold(lease.tenant, lease.since and 'draining' or 'running', lease, -1)
  room_grew()
  stand(lease.tenant)
end

local function free(id, lease)
  set('hold', num('hold') + HOLD_SMOOTHING * (now - lease.granted - num('hold')))
  freed[#freed + 1] = {tenant = lease.tenant, cells = lease.cells, ms = now - lease.granted}
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

-- What a gate tells of its lease comes as ages, so that what is late looks later: always the careful side. Output that
-- has come is charged as far as it was not yet.
local function tell(lease, told)
  if told.handed_age then lease.handed = math.max(now - told.handed_age, lease.handed or 0) end
  if told.answered_age then
    lease.answered = math.min(now - told.answered_age, lease.answered or now)
    if (lease.prefill or 0) > 0 then room_grew() end
    add('prefill', -(lease.prefill or 0))
    lease.prefill = nil
  end
  local before = lease.streamed or 0
  if (told.output or 0) > before then
    local most = lease.cells - lease.size.prompt_sum
    lease.streamed = told.output
    tenant_add(lease.tenant, 'filled', math.min(told.output, most) - math.min(before, most))
    charge_service(lease, lease.size.prompt_sum, 0, told.output)
  end
end

local function promote()
  while num('waiting') > 0 do
    local id, ticket, passed, blocked = next_in_line()
    if not id then break end
    if not may_pass(blocked) then
      begin_clearing(passed, blocked)
      break
    end
    let_by(passed, blocked)
    leave_queue(id, ticket)
    take(id, ticket, false)
    granted[#granted + 1] = id
    push(ticket.gate, 'granted', id)
  end
  note_clearing()
end

-- What time has brought: grants unclaimed, leases expired, gates lost, drains overdue; in this order.
local function sweep()
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', key.ends, '-inf', now)) do
    local lease = record(key.leases, id)
    if lease.claimed then
      charge_reserved(lease)
      drain(id, lease, true)
      add('expired', 1)
    else
      charge(lease, -1)
      charge_service(lease, 0, 0, 0)
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

-- Everybody who waits: ids and their tickets, by number, and the names of their tenants.
local function all_waiting()
  local all, names, known = {}, {}, {}
  for _, member in ipairs(redis.call('ZRANGE', key.queue, 0, -1)) do
    local name = member:sub(1, member:find('\0', 1, true) - 1)
    local id = member:sub(#name + 19)
    all[#all + 1] = {id = id, ticket = record(key.tickets, id)}
    if not known[name] then names[#names + 1] = name end
    known[name] = true
  end
  table.sort(all, function(a, b) return a.ticket.number < b.ticket.number end)
  table.sort(names)
  return all, names
end

local function resize(new)
  pool = new
  set('pool', cjson.encode(new))
  local all, names = all_waiting()
  local lost = {}
  for _, one in ipairs(all) do
    if not can_ever_fit(one.ticket.size) then lost[#lost + 1] = one end
  end
  for _, one in ipairs(lost) do
    withdraw(one.id)
    push(one.ticket.gate, 'changed', one.id)
  end
  size_parts()
  sum_parts()
  room_grew()
  for _, name in ipairs(names) do stand(name) end
  promote()
end

local function lease_told(id, lease)
  return {id = id, cells = lease.cells, sequences = lease.size.sequences, queued = lease.granted - lease.asked}
end

local function gap()
  if num('waiting') < 2 then return 0 end
  local least = redis.call('ZRANGE', key.heads, 0, 0, 'WITHSCORES')[2]
  return least and tonumber(redis.call('ZRANGE', key.heads, -1, -1, 'WITHSCORES')[2]) - tonumber(least) or 0
end

-- The end of a step: counters of those who are away are kept apart, and where nobody is here all begin alike.
local function forget_all()
  for name in pairs(tenants) do tenant_set(name, 'counter', nil) end
  if num('away') > 0 then
    redis.call('DEL', key.away)
    set('away', 0)
  end
  for _, name in ipairs({'last', 'last_spot', 'gap_max'}) do clear(name) end
  for _, what in ipairs(VOIDS) do clear('void_' .. what) end
end

local function forget()
  for name in pairs(tenant_changed) do
    local mine = tenants[name]
    local here = mine.running or mine.draining or mine.waiting
    if here and away_of[name] then
      redis.call('ZREM', key.away, name)
      add('away', -1)
    elseif not here and mine.counter then
      add('away', redis.call('ZADD', key.away, mine.counter, name))
      away_of[name], mine.counter = tonumber(mine.counter), nil
    end
  end
  if num('away') > 0 then
    local floors = {}
    for _, spot in ipairs({false, true}) do
      local floor = floor_of(spot)
      if floor then floors[#floors + 1] = floor end
    end
    local least = #floors > 0 and math.min(unpack(floors)) or 0
    for _, name in ipairs(redis.call('ZRANGEBYSCORE', key.away, '-inf', '(' .. whole(least))) do
      if name ~= text('last') and name ~= text('last_spot') then add('away', -redis.call('ZREM', key.away, name)) end
    end
  end
  local most = gap()
  if most > num('gap_max') then set('gap_max', most) end
end

local function tidy()
  if num('sequences') == 0 and num('waiting') == 0 then forget_all() else forget() end
end

local function answer(found)
  tidy()
  local flat = {}
  for name in pairs(state_changed) do
    flat[#flat + 1] = name
    flat[#flat + 1] = state[name]
  end
  if #flat > 0 then redis.call('HSET', key.state, unpack(flat)) end
  for name in pairs(tenant_changed) do
    local mine = tenants[name]
    if not (mine.running or mine.draining or mine.waiting) then mine.weight = nil end
    if next(mine) then
      keep(key.tenants, name, mine)
    else
      redis.call('HDEL', key.tenants, name)
    end
  end
  found.now, found.retry = now, retry_ms()
  found.tally = {held = num('sequences'), granted = num('granted')}
  if #granted > 0 then found.granted = granted end
  if #freed > 0 then found.freed = freed end
  return cjson.encode(found)
end
