-- A gate tells what it holds: what the ledger has forgotten is counted again, whatever fits.
-- ask: gate, held [{id, tenant, quota, weight, spot, size, cells, handed_age, answered_age, output}, ...]
redis.call('ZADD', key.gates, now + num('ttl'), ask.gate)
for _, one in ipairs(ask.held) do
  if redis.call('HEXISTS', key.leases, one.id) == 0 then
    withdraw(one.id)
    local lease = {
      gate = ask.gate,
      tenant = one.tenant,
      quota = one.quota,
      size = one.size,
      weight = one.weight or MILLI,
      spot = one.spot,
      cells = one.cells,
      asked = now,
      step = math.floor(now / STEP_MS),
      requests = 0,
      tokens = 0,
    }
    pass_through(lease)
    take(one.id, lease, true)
    tell(lease, one)
    keep(key.leases, one.id, lease)
  end
end
sweep()
return answer({})
