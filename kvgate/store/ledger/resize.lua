-- The engine is another one now. What is held stays counted; who can never fit is told so.
-- ask: pool
if not pool then return cjson.encode({unset = true, now = now}) end
sweep()
resize(ask.pool)
return answer({})
