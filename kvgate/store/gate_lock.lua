-- Takes or keeps the place of the one gate in front of an engine.
-- KEYS 1 the place   ARGV 1 who asks, 2 for how many milliseconds (0: give it back)
-- Gives who has the place now, or "" where nobody does.
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then return holder end
if ARGV[2] == '0' then
  redis.call('DEL', KEYS[1])
  return ''
end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return ARGV[1]
