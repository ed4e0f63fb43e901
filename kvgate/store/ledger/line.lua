-- Who is next: lines (core/fair_queue.py), and whom the front of one lets by (core/next_in_line.py).

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
    redis.call('ZREM', by_cells(spot_before), before)
    if mine.owner then redis.call('ZREM', key.owners, before) end
  end
  local owner = ticket and in_its_share(ticket) or nil
  local place = ticket and place_of(id, ticket) or nil
  local spot = ticket and ticket.spot or nil
  if place then
    redis.call('ZADD', line_of(spot), whole(counter(name)), place)
    redis.call('ZADD', by_cells(spot), whole(cells(ticket.size)), place)
    if text(in_vain(spot)) and fits(ticket) then clear(in_vain(spot)) end
    if owner then redis.call('ZADD', key.owners, whole(counter(name)), place) end
  end
  tenant_set(name, 'place', place)
  tenant_set(name, 'spot', spot)
  tenant_set(name, 'owner', owner)
  if before and not (place and spot == spot_before) then leaves_line(name, spot_before) end
end

-- Looks along a line from its front until `look` gives true; at `extra` too, whose place would be `mine`. Gives whether
-- all were looked at.
local function look_along(line, extra, mine, look)
  if num('waiting') == 0 then return not (extra and look(mine)) end
  local ahead = extra and redis.call('ZCOUNT', line, '-inf', whole(lifted(extra)))
  local looked, more, all = 0, LOOK_FIRST, false
  while looked < LOOK_PAST do
    local places = redis.call('ZRANGE', line, looked, math.min(looked + more, LOOK_PAST) - 1)
    for _, place in ipairs(places) do
      if looked == ahead and look(mine) then return end
      looked = looked + 1
      if look(place) then return end
    end
    all = #places < more and looked < LOOK_PAST
    if all then break end
    more = LOOK_NEXT
  end
  return not (looked == ahead and look(mine)) and all
end

-- Whether anybody stands in this line, and whether it is worth looking along: what is needed least of cells is free.
local function worth_looking(spot)
  local least = num('waiting') > 0 and redis.call('ZRANGE', by_cells(spot), 0, 0, 'WITHSCORES')[2]
  local _, free_cells = room_left()
  return least and true, least and tonumber(least) <= free_cells and not text(in_vain(spot))
end

-- The first in line that fits, and whoever was to go before it and is worth draining for: their places.
local function first_that_fits(spot, extra, mine)
  local free_slots, free_cells, free_prompt = room_left()
  local found, passed
  local all = look_along(line_of(spot), extra, mine, function(place)
    local most = cells_in(place)
    if most > free_cells and (passed or spot) then return end
    local slots, prompt, lent = needs_in(place)
    local room = most <= free_cells and slots <= free_slots and prompt <= free_prompt
    if room and may_have(tenant_in(place), spot, slots, most, lent) then
      found = place
    elseif not passed and not spot and will_fit(tenant_in(place), slots, most) then
      passed = place
    end
    return found
  end)
  if all then set(in_vain(spot), '1') end
  return found, passed
end

-- Whom nobody may go before any more; nobody where it has left, or could go in only on what is lent.
local function cleared_for()
  local id = text('clearing')
  if not id then return end
  local ticket = record(key.tickets, id)
  if ticket and tenant(ticket.tenant).place == place_of(id, ticket) and will_fit(ticket.tenant, needs_of(ticket.size)) then
    return id, ticket
  end
  clear('clearing')
end

-- Gives who goes in next and its ticket, and who was to go before it but does not fit, and its ticket.
local closed = false
local function next_in_line(extra)
  if closed or num('sequences') >= pool.slots then return end
  if extra and (tenant(extra.tenant).waiting or not inside_quota(extra)) then extra = nil end
  local mine = extra and place_of('', extra)
  local function at(place)
    if place == mine then return extra, extra end
    return id_in(place), record(key.tickets, id_in(place))
  end
  if next(parts) then
    local found, anybody
    look_along(key.owners, extra and in_its_share(extra) and extra or nil, mine, function(place)
      local slots, prompt = needs_in(place)
      anybody, found = true, has_room(slots, cells_in(place), prompt) and place
      return found
    end)
    if found then return at(found) end
    if anybody then return end
  end
  local first, its = cleared_for()
  if first then
    if fits(its) then return first, its end
    return
  end
  for _, spot in ipairs({false, true}) do
    local here = extra and (extra.spot or false) == spot and extra or nil
    local anybody, worth = worth_looking(spot)
    if worth or (here and fits(here)) then
      local found, passed = first_that_fits(spot, here, mine)
      if found then
        local id, ticket = at(found)
        if not passed then return id, ticket end
        return id, ticket, at(passed)
      end
    end
    if here or anybody then return end
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
  local _, worth = worth_looking(false)
  if not worth then return end
  look_along(key.heads, nil, nil, function(place)
    first = first or id_in(place)
    local slots, prompt, lent = needs_in(place)
    local most = cells_in(place)
    if
      has_room(slots, most, prompt)
      and id_in(place) ~= first
      and may_have(tenant_in(place), false, slots, most, lent)
    then
      set('kept_out', now)
      return true
    end
  end)
end
