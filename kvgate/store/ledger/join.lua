-- A gate comes, or comes back. Gives "pool", the one that is guarded, and "rule", which is in force.
-- ask: gate, pool, ttl, drain_max, server (the run of this server), knew (whether the gate knew a ledger here before),
-- rule (prices and bounds of fairness)
if taking_over then
  -- Gates of the version before are refused from now on. What they hold stays counted; their tickets, which stand in
  -- no line that can be read here, go.
  set('layout', LAYOUT)
  set('waiting', 0)
  redis.call('DEL', key.tickets, key.queue, key.of_gate, key.heads)
  local old = redis.call('HGETALL', key.tenants)
  for i = 1, #old, 2 do tenant_set(old[i], 'waiting', nil) end
  local leases = redis.call('HGETALL', key.leases)
  for i = 1, #leases, 2 do
    local lease = cjson.decode(leases[i + 1])
    lease.weight = MILLI
    tenant_set(lease.tenant, 'weight', MILLI)
    tenant_add(lease.tenant, 'filled', math.min(lease.size.prompt_sum, lease.cells))
    keep(key.leases, leases[i], lease)
  end
end
if not pool then
  set('layout', LAYOUT)
  set('hold', 2000)
  set('pool', cjson.encode(ask.pool))
  set('server', ask.server)
  pool = ask.pool
  if ask.knew then set('closed_until', now + ask.ttl) end
elseif state.server ~= ask.server then
  set('server', ask.server)
  set('closed_since', now)
  set('closed_until', now + ask.ttl)
end
set('ttl', ask.ttl)
set('drain_max', ask.drain_max)
if ask.rule then
  rule = ask.rule
  set('rule', cjson.encode(rule))
  room_grew()
end
sweep()

-- The pool of a gate that is alone is the one to guard.
local same = true
for name, value in pairs(ask.pool) do same = same and pool[name] == value end
local others = redis.call('ZCARD', key.gates) - (redis.call('ZSCORE', key.gates, ask.gate) and 1 or 0)
if not same and others == 0 then resize(ask.pool) end
return answer({pool = pool, rule = rule})
