-- Give back what stands under an id: at once where the engine said that it ended, else by draining.
-- ask: id, ended, handed_age, answered_age, output, used {prompt, cached, output}
sweep()
local lease = record(key.leases, ask.id)
if withdraw(ask.id) then
  promote()
elseif lease and lease.since then
  -- It expired, and its gate is there after all: it knows.
  if lease.lost and ask.ended then
    free(ask.id, lease)
    promote()
  end
elseif lease then
  tell(lease, ask)
  if not lease.handed then
    charge(lease, -1)
    charge_service(lease, 0, 0, 0)
  elseif ask.used then
    if lease.tokens > 0 then
      minute_add(lease.tenant, 'tokens', lease.step, ask.used.prompt + ask.used.output - lease.tokens, true)
    end
    charge_service(lease, ask.used.prompt, ask.used.cached, ask.used.output)
  else
    charge_reserved(lease)
  end
  if not ask.ended and lease.handed then
    drain(ask.id, lease)
  else
    free(ask.id, lease)
  end
  promote()
end
return answer({})
