-- What is held and who waits, now; looks at every tenant there is.
sweep()
local found, flat = {}, redis.call('HGETALL', key.tenants)
for i = 1, #flat, 2 do
  local _, requests = minute(flat[i], 'requests')
  local _, tokens = minute(flat[i], 'tokens')
  local one = tenants[flat[i]] or cjson.decode(flat[i + 1])
  found[#found + 1] = {
    name = flat[i],
    running = one.running or 0,
    draining = one.draining or 0,
    cells = one.cells or 0,
    waiting = one.waiting or 0,
    requests = requests,
    tokens = tokens,
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
})
