-- What is held and who waits, now; looks at every tenant there is.
sweep()
tidy()
local voids = {}
for _, what in ipairs(VOIDS) do
  if text('void_' .. what) then voids[#voids + 1] = what end
end
local found, flat = {}, redis.call('HGETALL', key.tenants)
for i = 1, #flat, 2 do
  local _, requests = minute(flat[i], 'requests')
  local _, tokens = minute(flat[i], 'tokens')
  local _, service = minute(flat[i], 'service')
  local one = tenant(flat[i])
  found[#found + 1] = {
    name = flat[i],
    running = one.running or 0,
    draining = one.draining or 0,
    cells = one.cells or 0,
    waiting = one.waiting or 0,
    requests = requests,
    tokens = tokens,
    service = service,
    counter = counter(flat[i]),
    weight = one.weight,
    filled = one.filled or 0,
    since = one.since,
  }
end
return answer({
  pool = pool,
  tenants = #found > 0 and found or nil,
  cells = num('cells'),
  sequences = num('sequences'),
  waiting = num('waiting'),
  overdue = num('overdue'),
  expired = num('expired'),
  closed = closed,
  fair = {
    gap = gap(),
    gap_max = num('gap_max'),
    bypasses = num('bypasses'),
    drains = num('clearings'),
    drain_idle = num('clearing_idle'),
    prefill = num('prefill'),
    voids = table.concat(voids, ' '),
    rule = rule,
  },
})
