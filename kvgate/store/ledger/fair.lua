-- What fits (core/pool.py, core/room.py), what is guaranteed (core/guarantee.py), and counters (core/fair_queue.py).

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

local parts, parts_slots, parts_tokens = {}, 0, 0
local function size_parts()
  parts, parts_slots, parts_tokens = {}, 0, 0
  if not text('shares') then return end
  local grantable = pool.tokens - pool.headroom
  for name, ppm in pairs(cjson.decode(state.shares)) do
    local slots = math.min(math.floor((ppm * pool.slots + NEARLY_PPM) / PPM), pool.slots)
    local most = math.floor(ppm * grantable / PPM)
    if pool.slots * pool.tokens_per_slot <= grantable then most = math.max(most, slots * pool.tokens_per_slot) end
    parts[name] = {slots = slots, tokens = most}
    parts_slots, parts_tokens = parts_slots + slots, parts_tokens + most
  end
end
if pool then size_parts() end

local function unused(name)
  local part = parts[name]
  if not part then return 0, 0 end
  local mine = tenant(name)
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

-- What a request needs: sequences, cells, prompt tokens, and the output that it may be lent something for. A place in
-- line has it written in, so that whoever looks along the line reads no ticket.
local function needs_of(size)
  return size.sequences, cells(size), size.prompt_sum, size.output * (1 + size.queued)
end

local function place_of(id, one)
  return string.format('%016d%06d%012d%012d%012d', one.number or 0, needs_of(one.size)) .. one.tenant .. '\0' .. id
end

local function id_in(place) return place:sub(place:find('\0', 59, true) + 1) end
local function tenant_in(place) return place:sub(59, place:find('\0', 59, true) - 1) end
local function cells_in(place) return tonumber(place:sub(23, 34)) end
local function needs_in(place)
  return tonumber(place:sub(17, 22)), tonumber(place:sub(35, 46)), tonumber(place:sub(47, 58))
end

local function will_fit(name, slots, most)
  local part = parts[name]
  return slots + parts_slots - (part and part.slots or 0) <= pool.slots
    and most + parts_tokens - (part and part.tokens or 0) <= pool.tokens - pool.headroom
end

-- Slots, cells and prompt tokens that are free, whoever they are held back for.
local function room_left()
  local prefill = num('prefill')
  return pool.slots - num('sequences'),
    pool.tokens - pool.headroom - num('cells'),
    (not rule.prefill_max or prefill == 0) and math.huge or rule.prefill_max - prefill
end

local function has_room(slots, most, prompt)
  local free_slots, free_cells, free_prompt = room_left()
  return slots <= free_slots and most <= free_cells and prompt <= free_prompt
end

-- Whether what has room leaves what is held back for others, or may have that lent.
local function may_have(name, spot, slots, most, lent)
  if not next(parts) or (not spot and lent <= rule.lent_max) then return true end
  local own_slots, own_most = unused(name)
  local free_slots, free_cells = room_left()
  return slots + num('back_slots') - own_slots <= free_slots and most + num('back_tokens') - own_most <= free_cells
end

local function fits(one)
  local slots, most, prompt, lent = needs_of(one.size)
  return has_room(slots, most, prompt) and may_have(one.tenant, one.spot, slots, most, lent)
end

-- Where a whole line was looked along in vain, that stays so until there is more room, or one comes who fits.
local function in_vain(spot) return spot and 'vain_spot' or 'vain' end
local function room_grew()
  clear('vain')
  clear('vain_spot')
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
local function by_cells(spot) return spot and key.spot_cells or key.heads_cells end
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
