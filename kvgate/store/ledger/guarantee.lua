-- These tenants, and no others, have a part of the pool of their own from now on.
-- ask: shares {tenant: millionths}
sweep()
set('shares', cjson.encode(ask.shares))
size_parts()
sum_parts()
room_grew()
local _, names = all_waiting()
for _, name in ipairs(names) do stand(name) end
promote()
return answer({})
