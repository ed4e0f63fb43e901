-- A gate goes: its tickets with it; what it holds is left to expire.
-- ask: gate
if redis.call('ZSCORE', key.gates, ask.gate) then redis.call('ZADD', key.gates, 0, ask.gate) end
sweep()
return answer({})
