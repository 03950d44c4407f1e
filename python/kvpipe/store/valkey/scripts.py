"""The store's state changes, each an atomic script of the server.

KEYS are a value's manifest, its reservation or pins, and the beginning of its parts' keys. Times are the server's. A
script that can fail for lack of memory does so at its first write, and has then changed nothing.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass


@dataclass(frozen=True)
class Script:
    """A script and the hash by which the server knows it."""

    text: bytes
    sha: bytes

    @classmethod
    def of(cls, text: str) -> Script:
        """Hashes a script."""
        encoded = text.encode()
        return cls(encoded, hashlib.sha1(encoded, usedforsecurity=False).hexdigest().encode())


_FUNCTIONS = """
local function lease_ms(field)
  return tonumber(field or 0) or 0
end
local function now_ms()
  local now = redis.call('TIME')
  return now[1] * 1000 + math.floor(now[2] / 1000)
end
local function parts(epoch, num_parts)
  local keys = {}
  for number = 1, tonumber(num_parts or 0) do
    keys[number] = KEYS[3] .. ':' .. epoch .. ':' .. (number - 1)
  end
  return keys
end
local function unlink(keys)
  for _, key in ipairs(keys) do redis.call('UNLINK', key) end
end
local function last_pin_ms(now)
  redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now)
  local last = redis.call('ZRANGE', KEYS[2], -1, -1, 'WITHSCORES')
  return tonumber(last[2] or 0)
end
"""

# ARGV: epoch, milliseconds.
RESERVE = Script.of("""
if redis.call('EXISTS', KEYS[1]) == 1 then return 0 end
if redis.call('SET', KEYS[2], ARGV[1], 'NX', 'PX', ARGV[2]) then return 1 end
return 0
""")

# ARGV: epoch, number of parts, milliseconds.
EXTEND = Script.of(
    _FUNCTIONS
    + """
if redis.call('GET', KEYS[2]) ~= ARGV[1] then return 0 end
redis.call('PEXPIRE', KEYS[2], ARGV[3])
for _, key in ipairs(parts(ARGV[1], ARGV[2])) do redis.call('PEXPIRE', key, ARGV[3]) end
return 1
"""
)

# ARGV: epoch, bytes, parts, number of parts, record, milliseconds to live or 0, milliseconds for readers, channel.
# Answers 1 when the value is visible, 0 when the reservation has ended, -1 when a part is not there.
COMMIT = Script.of(
    _FUNCTIONS
    + """
if redis.call('HGET', KEYS[1], 'e') == ARGV[1] then return 1 end
if redis.call('GET', KEYS[2]) ~= ARGV[1] then return 0 end
local keys = parts(ARGV[1], ARGV[4])
for number, key in ipairs(keys) do
  if redis.call('STRLEN', key) ~= struct.unpack('<I4', ARGV[3], number * 12 - 11) then return -1 end
end
redis.call('HSET', KEYS[1], 'e', ARGV[1], 'n', ARGV[2], 'p', ARGV[3], 'c', ARGV[4], 'r', ARGV[5])
local ttl = tonumber(ARGV[6])
if ttl > 0 then redis.call('PEXPIRE', KEYS[1], ttl) end
for _, key in ipairs(keys) do
  if ttl > 0 then redis.call('PEXPIRE', key, ttl + ARGV[7]) else redis.call('PERSIST', key) end
end
redis.call('DEL', KEYS[2])
redis.call('PUBLISH', ARGV[8], 'committed')
return 1
"""
)

# ARGV: epoch, number of parts. A value whose commit was not answered stays.
ABORT = Script.of(
    _FUNCTIONS
    + """
if redis.call('HGET', KEYS[1], 'e') == ARGV[1] then return 0 end
if redis.call('GET', KEYS[2]) == ARGV[1] then redis.call('DEL', KEYS[2]) end
unlink(parts(ARGV[1], ARGV[2]))
return 1
"""
)

# ARGV: 'select' or 'take', token, milliseconds. A value that lost a part is deleted.
FIND = Script.of(
    _FUNCTIONS
    + """
local found = redis.call('HMGET', KEYS[1], 'e', 'n', 'p', 'r', 'c', 'l')
if not found[1] then return {'missing'} end
local now = now_ms()
local leased = lease_ms(found[6])
if leased > now then return {'busy', leased - now} end
local keys = parts(found[1], found[5])
for _, key in ipairs(keys) do
  if redis.call('EXISTS', key) == 0 then
    redis.call('UNLINK', KEYS[1])
    unlink(keys)
    return {'corrupt'}
  end
end
local pinned, ends = last_pin_ms(now), now + ARGV[3]
if ARGV[1] == 'take' then
  if pinned > now then return {'busy', pinned - now} end
  redis.call('HSET', KEYS[1], 'l', string.format('%.0f', ends), 't', ARGV[2])
else
  redis.call('ZADD', KEYS[2], string.format('%.0f', ends), ARGV[2])
  redis.call('PEXPIRE', KEYS[2], string.format('%.0f', math.max(pinned, ends) - now))
end
return {'found', found[1], found[2], found[3], found[4]}
"""
)

# ARGV: token, milliseconds.
PIN = Script.of(
    _FUNCTIONS
    + """
if not redis.call('ZSCORE', KEYS[2], ARGV[1]) then return 0 end
local now = now_ms()
local ends = now + ARGV[2]
redis.call('ZADD', KEYS[2], string.format('%.0f', ends), ARGV[1])
redis.call('PEXPIRE', KEYS[2], string.format('%.0f', math.max(last_pin_ms(now), ends) - now))
return 1
"""
)

# ARGV: token, channel.
UNPIN = Script.of("""
if redis.call('ZREM', KEYS[2], ARGV[1]) == 1 and redis.call('EXISTS', KEYS[2]) == 0 then
  redis.call('PUBLISH', ARGV[2], 'closed')
end
return 1
""")

# ARGV: 'renew', 'acknowledge' or 'release', token, milliseconds, channel.
LEASE = Script.of(
    _FUNCTIONS
    + """
local found = redis.call('HMGET', KEYS[1], 'e', 'c', 'l', 't')
local now = now_ms()
if found[4] ~= ARGV[2] or lease_ms(found[3]) <= now then return 0 end
if ARGV[1] == 'renew' then
  redis.call('HSET', KEYS[1], 'l', string.format('%.0f', now + ARGV[3]))
elseif ARGV[1] == 'release' then
  redis.call('HDEL', KEYS[1], 'l', 't')
  redis.call('PUBLISH', ARGV[4], 'released')
else
  redis.call('UNLINK', KEYS[1])
  unlink(parts(found[1], found[2]))
end
return 1
"""
)

DELETE = Script.of(
    _FUNCTIONS
    + """
local found = redis.call('HMGET', KEYS[1], 'e', 'c', 'l')
local now = now_ms()
if not found[1] or lease_ms(found[3]) > now or last_pin_ms(now) > now then return 0 end
redis.call('UNLINK', KEYS[1])
unlink(parts(found[1], found[2]))
return 1
"""
)

# ARGV: epoch. Deletes a value that is not what was committed.
DISCARD = Script.of(
    _FUNCTIONS
    + """
local found = redis.call('HMGET', KEYS[1], 'e', 'c')
if found[1] ~= ARGV[1] then return 0 end
redis.call('UNLINK', KEYS[1])
unlink(parts(found[1], found[2]))
return 1
"""
)
