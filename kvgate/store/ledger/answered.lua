-- The first output of these has come: their prompts are read, and others may be.
-- ask: held [{id, handed_age, answered_age, output}, ...]
sweep()
for _, told in ipairs(ask.held) do
  local lease = record(key.leases, told.id)
  if lease and lease.claimed and not lease.since then
    tell(lease, told)
    keep(key.leases, told.id, lease)
  end
end
promote()
return answer({})
