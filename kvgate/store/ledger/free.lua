-- End drains that looks at the engine's slots proved to be over; what does not drain stays as it is.
-- ask: ids
sweep()
for _, id in ipairs(ask.ids) do
  local lease = record(key.leases, id)
  if lease and lease.since then free(id, lease) end
end
promote()
return answer({})
