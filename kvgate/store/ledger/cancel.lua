-- Leave the queue, if they are in it. Gives "waiting": how many of the tenant's requests still wait.
-- ask: ids, tenant
sweep()
for _, id in ipairs(ask.ids) do withdraw(id) end
promote()
return answer({waiting = ask.tenant and tenant(ask.tenant).waiting or 0})
