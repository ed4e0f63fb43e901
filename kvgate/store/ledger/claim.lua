-- Take what was granted; also how one who waits asks where it stands. Gives "lease", "waiting" or neither.
-- ask: id
sweep()
if redis.call('HEXISTS', key.tickets, ask.id) == 1 then return answer({waiting = true}) end
local lease = record(key.leases, ask.id)
if not lease or lease.since then return answer({}) end
claim(ask.id, lease)
return answer({lease = lease_told(ask.id, lease)})
