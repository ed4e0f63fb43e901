-- Give back what stands under an id: at once where the engine said that it ended, else by draining.
-- ask: id, ended, handed_age, answered_age, used_tokens
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
  elseif ask.used_tokens and lease.tokens > 0 then
    minute_add(lease.tenant, 'tokens', lease.step, ask.used_tokens - lease.tokens, true)
  end
  if not ask.ended and lease.handed then
    drain(ask.id, lease)
  else
    free(ask.id, lease)
    promote()
  end
end
return answer({})
