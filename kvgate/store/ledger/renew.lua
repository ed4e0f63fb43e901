-- A gate is there, and has these leases in hand.
-- ask: gate, sent (the gate's lower bound of the server's time), held [{id, handed_age, answered_age, output}, ...]
-- Gives "unknown": ids to register; "lost": ids that drain already; "pool" and "rule"; and while anything drains "leases": the facts of all that are held.
local unknown, lost = {}, {}
for _, told in ipairs(ask.held) do
  local lease = record(key.leases, told.id)
  if lease and lease.claimed and not lease.since then
    tell(lease, told)
    lease.unsettled = math.max(lease.unsettled or 0, math.min(ask.sent, now))
    keep(key.leases, told.id, lease)
    redis.call('ZADD', key.ends, now + num('ttl'), told.id)
  elseif lease and lease.since then
    lost[#lost + 1] = told.id
  elseif not lease and redis.call('HEXISTS', key.tickets, told.id) == 0 then
    unknown[#unknown + 1] = told.id
  end
end
-- A gate whose leases were forgotten has not been heard of until it registers them.
if #unknown == 0 then
  redis.call('ZADD', key.gates, now + num('ttl'), ask.gate)
  redis.call('PEXPIRE', base .. ':to:' .. ask.gate, num('ttl') * 4)
end
sweep()

local found = {pool = pool, rule = rule, unknown = #unknown > 0 and unknown or nil, lost = #lost > 0 and lost or nil}
if redis.call('ZCARD', key.draining) > 0 then
  local leases, flat = {}, redis.call('HGETALL', key.leases)
  for i = 1, #flat, 2 do
    local lease = cjson.decode(flat[i + 1])
    leases[#leases + 1] = {
      id = flat[i],
      gate = lease.gate,
      output = lease.size.output,
      queued = lease.size.queued,
      prompt_sum = lease.size.prompt_sum,
      handed = lease.handed,
      answered = lease.answered,
      since = lease.since,
      unsettled = lease.unsettled,
    }
  end
  found.leases = leases
end
return answer(found)
