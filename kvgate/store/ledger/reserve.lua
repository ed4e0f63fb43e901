-- Take the cells and slots now, or queue, or refuse; everything is checked, then taken.
-- ask: gate, id, tenant, quota, weight, spot, size {prompt, output, sequences, prompt_sum, prompts, queued, asked_tokens}
-- Gives "lease", or "ahead" (a place in the queue), or "denied" with "waiting" and perhaps "wait" (ms).
sweep()
if not redis.call('ZSCORE', key.gates, ask.gate) then redis.call('ZADD', key.gates, now + num('ttl'), ask.gate) end

local function denied(reason, wait)
  return answer({denied = reason, waiting = tenant(ask.tenant).waiting or 0, wait = wait})
end

-- 0. Asked again for the same id: the same answer.
if redis.call('HEXISTS', key.tickets, ask.id) == 1 then return answer({ahead = 0}) end
local again = record(key.leases, ask.id)
if again and again.since then return answer({denied = 'engine_changed', waiting = 0}) end
if again then
  claim(ask.id, again)
  return answer({lease = lease_told(ask.id, again)})
end

-- 1. What the pool can never hold is told so.
if not can_ever_fit(ask.size) then return denied('engine_changed') end

-- 2. What the tenant's minute does not allow is told when it will.
local requests_wait = minute_wait(ask.tenant, 'requests', 1, ask.quota.requests_per_minute)
local tokens_wait = minute_wait(ask.tenant, 'tokens', ask.size.asked_tokens, ask.quota.tokens_per_minute)
if requests_wait > 0 or tokens_wait > 0 then
  local reason = requests_wait > 0 and 'requests_per_minute' or 'tokens_per_minute'
  return denied(reason, math.max(requests_wait, tokens_wait))
end

local one = {
  gate = ask.gate,
  tenant = ask.tenant,
  quota = ask.quota,
  size = ask.size,
  weight = ask.weight,
  spot = ask.spot,
  asked = now,
  step = math.floor(now / STEP_MS),
  requests = ask.quota.requests_per_minute and 1 or 0,
  tokens = ask.quota.tokens_per_minute and ask.size.asked_tokens or 0,
}

-- 3. A spot tenant does not begin to wait while others wait.
if one.spot and num('waiting') > 0 and redis.call('ZCARD', key.heads) > 0 then return denied('spot_refused') end

-- 4. It fits, and whoever comes before it may be passed: granted.
local next_one, _, passed, blocked = next_in_line(one)
if next_one == one and may_pass(blocked) then
  charge(one, 1)
  let_by(passed, blocked)
  pass_through(one)
  local lease = take(ask.id, one, true)
  note_clearing()
  return answer({lease = lease_told(ask.id, lease)})
end

-- 5. The tenant's queue has a place: it waits.
if (tenant(ask.tenant).waiting or 0) >= ask.quota.queue_max then return denied('queue_full') end
local ahead = num('waiting')
add('number', 1)
one.number = num('number')
charge(one, 1)
tenant_set(one.tenant, 'weight', one.weight)
set_counter(one.tenant, lifted(one))
keep(key.tickets, ask.id, one)
redis.call('ZADD', key.queue, 0, place_in_queue(one, ask.id))
redis.call('ZADD', key.of_gate, 0, one.gate .. '\0' .. ask.id)
add('waiting', 1)
tenant_add(one.tenant, 'waiting', 1)
if tenant(one.tenant).waiting == 1 then stand(one.tenant) end
local _, _, late, its = next_in_line()
begin_clearing(late, its)
note_clearing()
return answer({ahead = ahead})
