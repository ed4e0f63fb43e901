-- Who is next: what fits (core/pool.py), what is guaranteed (core/guarantee.py), counters and lines
-- (core/fair_queue.py), and whom the front of the line lets by (core/ledger.py).

local function cells(size)
  local copies = pool.prompt_shared and 1 or math.floor(size.sequences / size.prompts)
  return size.sequences * (size.output + pool.margin) + size.prompt_sum * copies
end

local function can_ever_fit(size)
  return size.prompt + size.output + pool.margin <= pool.tokens_per_slot
    and size.sequences <= pool.slots
    and cells(size) <= pool.tokens - pool.headroom
end

local function inside_quota(one)
  local mine, quota = tenant(one.tenant), one.quota
  local sequences = (mine.running or 0) + (mine.draining or 0) + one.size.sequences
  return (not quota.concurrency_max or sequences <= quota.concurrency_max)
    and (not quota.kv_tokens_max or (mine.cells or 0) + cells(one.size) <= quota.kv_tokens_max)
end

local function retry_ms() return num('hold') * (1 + num('waiting') / pool.slots) end

local function void(what)
  if not text('void_' .. what) then set('void_' .. what, '1') end
end

-- Guarantees. The sums of what owners do not use are kept, so that nobody has to look at every owner.

local parts = {}
local function size_parts()
  parts = {}
  if not text('shares') then return end
  local grantable = pool.tokens - pool.headroom
  for name, ppm in pairs(cjson.decode(state.shares)) do
    local slots = math.min(math.floor((ppm * pool.slots + NEARLY_PPM) / PPM), pool.slots)
    local most = math.floor(ppm * grantable / PPM)
    if pool.slots * pool.tokens_per_slot <= grantable then most = math.max(most, slots * pool.tokens_per_slot) end
    parts[name] = {slots = slots, tokens = most}
  end
end
if pool then size_parts() end

local function unused(name)
  local part, mine = parts[name], tenant(name)
  if not part then return 0, 0 end
  return math.max(part.slots - (mine.running or 0) - (mine.draining or 0), 0),
    math.max(part.tokens - (mine.cells or 0), 0)
end

local function hold(name, field, lease, sign)
  local slots, most = unused(name)
  tenant_add(name, field, sign * lease.size.sequences)
  tenant_add(name, 'cells', sign * lease.cells)
  tenant_add(name, 'filled', sign * math.min(lease.size.prompt_sum + (lease.streamed or 0), lease.cells))
  local slots_now, most_now = unused(name)
  add('back_slots', slots_now - slots)
  add('back_tokens', most_now - most)
end

local function sum_parts()
  local slots, most = 0, 0
  for name in pairs(parts) do
    local own_slots, own_most = unused(name)
    slots, most = slots + own_slots, most + own_most
  end
  set('back_slots', slots)
  set('back_tokens', most)
end

local function in_its_share(one)
  local part, mine = parts[one.tenant], tenant(one.tenant)
  return part ~= nil
    and (mine.running or 0) + (mine.draining or 0) + one.size.sequences <= part.slots
    and (mine.cells or 0) + cells(one.size) <= part.tokens
end

local function will_fit(one)
  local slots, most = one.size.sequences, cells(one.size)
  for name, part in pairs(parts) do
    if name ~= one.tenant then slots, most = slots + part.slots, most + part.tokens end
  end
  return slots <= pool.slots and most <= pool.tokens - pool.headroom
end

local function has_room(size)
  local prefill = num('prefill')
  return num('sequences') + size.sequences <= pool.slots
    and num('cells') + cells(size) <= pool.tokens - pool.headroom
    and (not rule.prefill_max or prefill == 0 or prefill + size.prompt_sum <= rule.prefill_max)
end

local function fits(one)
  local size = one.size
  if not has_room(size) then return false end
  if not next(parts) then return true end
  if not one.spot and size.output * (1 + size.queued) <= rule.lent_max then return true end
  local slots, most = unused(one.tenant)
  return num('sequences') + size.sequences + num('back_slots') - slots <= pool.slots
    and num('cells') + cells(size) + num('back_tokens') - most <= pool.tokens - pool.headroom
end

-- Counters

local away_of = {}
local function counter(name)
  local found = tenant(name).counter
  if found then return tonumber(found) end
  if away_of[name] == nil then
    away_of[name] = num('away') > 0 and tonumber(redis.call('ZSCORE', key.away, name) or nil) or false
  end
  return away_of[name] or 0
end

local function line_of(spot) return spot and key.spot or key.heads end
local function whole(number) return string.format('%.0f', number) end

local function set_counter(name, value)
  counter(name) -- whether it is kept among those that are away
  tenant_set(name, 'counter', whole(value))
  local place = tenant(name).place
  if place then
    redis.call('ZADD', line_of(tenants[name].spot), whole(value), place)
    if tenants[name].owner then redis.call('ZADD', key.owners, whole(value), place) end
  end
end

local function floor_of(spot)
  local first = num('waiting') > 0 and redis.call('ZRANGE', line_of(spot), 0, 0, 'WITHSCORES')[2]
  if first then return tonumber(first) end
  local last = text(spot and 'last_spot' or 'last')
  return last and counter(last)
end

local function lifted(one)
  local own = counter(one.tenant)
  if tenant(one.tenant).waiting then return own end
  return math.max(own, floor_of(one.spot) or 0)
end

local function leaves_line(name, spot)
  local field = spot and 'last_spot' or 'last'
  if state[field] ~= name then set(field, name) end
end

local function pass_through(one)
  set_counter(one.tenant, lifted(one))
  if not tenant(one.tenant).place then leaves_line(one.tenant, one.spot) end
end

local function weighted(service, weight) return math.floor(service * MILLI / weight) end

local function charge_service(lease, prompt, cached, output)
  local cheap, weight, before = math.min(cached, prompt), lease.weight, lease.service or 0
  local service = rule.input * (prompt - cheap) + rule.cached * cheap + rule.output * output
  local change = weighted(service, weight) - weighted(before, weight)
  set_counter(lease.tenant, counter(lease.tenant) + change)
  minute_add(lease.tenant, 'service', math.floor(now / STEP_MS), service - before)
  if cached > 0 and rule.cached ~= rule.input then void('cache_discount') end
  lease.service = service
end

local function charge_reserved(lease)
  charge_service(lease, lease.size.prompt_sum, 0, lease.size.sequences * lease.size.output)
end

-- Lines: a tenant stands in one with its first ticket, while that is inside its Quota

local function place_in_queue(one, id)
  return one.tenant .. '\0' .. string.format('%016d', one.number) .. '\0' .. id
end

local function head_of(name)
  local first = redis.call('ZRANGEBYLEX', key.queue, '[' .. name .. '\0', '(' .. name .. '\1', 'LIMIT', 0, 1)[1]
  return first and first:sub(#name + 19)
end

local function stand(name)
  local mine = tenant(name)
  local id = mine.waiting and head_of(name)
  local ticket = id and record(key.tickets, id)
  tenant_set(name, 'since', ticket and ticket.asked or nil)
  if ticket and not inside_quota(ticket) then
    ticket = nil
    void('quota')
  end
  local before, spot_before = mine.place, mine.spot
  if before then
    redis.call('ZREM', line_of(spot_before), before)
    if mine.owner then redis.call('ZREM', key.owners, before) end
  end
  local owner = ticket and in_its_share(ticket) or nil
  local place = ticket and string.format('%016d', ticket.number) .. name .. '\0' .. id or nil
  local spot = ticket and ticket.spot or nil
  if place then
    redis.call('ZADD', line_of(spot), whole(counter(name)), place)
    if owner then redis.call('ZADD', key.owners, whole(counter(name)), place) end
  end
  tenant_set(name, 'place', place)
  tenant_set(name, 'spot', spot)
  tenant_set(name, 'owner', owner)
  if before and not (place and spot == spot_before) then leaves_line(name, spot_before) end
end

-- The front of a line: ids of tickets; `extra`, which would stand there too, is itself.
local function front(line, extra)
  local flat, found = redis.call('ZRANGE', line, 0, LOOK_PAST - 1, 'WITHSCORES'), {}
  local own = extra and lifted(extra)
  for i = 1, #flat, 2 do
    if extra and tonumber(flat[i + 1]) > own then
      found[#found + 1] = extra
      extra = nil
    end
    found[#found + 1] = flat[i]:sub(flat[i]:find('\0', 1, true) + 1)
  end
  if extra then found[#found + 1] = extra end
  found[LOOK_PAST + 1] = nil
  return found
end

local function ticket_of(one) return type(one) == 'table' and one or record(key.tickets, one) end

-- Whom nobody may go before any more; nobody where it has left, or could go in only on what is lent.
local function cleared_for()
  local id = text('clearing')
  if not id then return end
  local ticket = record(key.tickets, id)
  local place = ticket and string.format('%016d', ticket.number) .. ticket.tenant .. '\0' .. id
  if ticket and tenant(ticket.tenant).place == place and will_fit(ticket) then return id, ticket end
  clear('clearing')
end

-- Gives who goes in next and its ticket, and who was to go before it but does not fit, and its ticket.
local closed = false
local function next_in_line(extra)
  if closed or num('sequences') >= pool.slots then return end
  if extra and (tenant(extra.tenant).waiting or not inside_quota(extra)) then extra = nil end
  if next(parts) then
    local owners = front(key.owners, extra and in_its_share(extra) and extra or nil)
    for _, one in ipairs(owners) do
      local ticket = ticket_of(one)
      if has_room(ticket.size) then return one, ticket end
    end
    if #owners > 0 then return end
  end
  local first, its = cleared_for()
  if first then
    if fits(its) then return first, its end
    return
  end
  for _, spot in ipairs({false, true}) do
    local line = front(line_of(spot), extra and (extra.spot or false) == spot and extra or nil)
    local passed, blocked
    for _, one in ipairs(line) do
      local ticket = ticket_of(one)
      if fits(ticket) then return one, ticket, passed, blocked end
      if not passed and not spot and will_fit(ticket) then passed, blocked = one, ticket end
    end
    if #line > 0 then return end
  end
end

local function may_pass(blocked) return not blocked or (blocked.passed or 0) < rule.bypass_max end

local function let_by(passed, blocked)
  if not blocked then return end
  blocked.passed = (blocked.passed or 0) + 1
  keep(key.tickets, passed, blocked)
  add('bypasses', 1)
  void('bypass')
end

local function begin_clearing(passed, blocked)
  if blocked and rule.bypass_max > 0 and not may_pass(blocked) then
    set('clearing', passed)
    add('clearings', 1)
  end
end

-- Counts the time in which somebody who would fit is kept out for the sake of the first in line.
local function note_clearing()
  if text('kept_out') then
    add('clearing_idle', now - num('kept_out'))
    clear('kept_out')
  end
  local first = cleared_for()
  if closed or not (first or rule.bypass_max == 0) then return end
  local line = front(key.heads)
  first = first or line[1]
  for _, one in ipairs(line) do
    if one ~= first and fits(ticket_of(one)) then
      set('kept_out', now)
      return
    end
  end
end
