-- A gate comes, or comes back. Gives "pool": the one that is guarded.
-- ask: gate, pool, ttl, drain_max, server (the run of this server), knew (whether the gate knew a ledger here before)
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
sweep()

-- The pool of a gate that is alone is the one to guard.
local same = true
for name, value in pairs(ask.pool) do same = same and pool[name] == value end
local others = redis.call('ZCARD', key.gates) - (redis.call('ZSCORE', key.gates, ask.gate) and 1 or 0)
if not same and others == 0 then resize(ask.pool) end
return answer({pool = pool})
