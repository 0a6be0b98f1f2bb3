"""Questions by their embeddings, in vector sets of a Redis 8.

    baton:semantic:2:TENANT:SCOPE    a vector set: questions of one scope, by the request's digest
    baton:semantic:2:TENANT:used     a sorted set: all questions of the tenant, by their last use

A question's answer is the response to its request (redis_store.py). Each scope, and so each tenant,
has its own vector set: a search in one cannot find another's questions. Answers expire by
themselves. A question without an answer is removed when a search finds it, a set when no question
was added for the lifetime of an answer.

A set's graph has vectors in 8 bits, which are searched in a third of the time, but then a
similarity of 0.97 means 0.965 to 0.975. So the full vector is kept as the question's attribute, and
the similarity of found questions is computed from it.

Each operation is one script, so that it takes one round trip and is atomic.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy

from baton.router.response_cache.cache_store import ResponseKey
from baton.router.response_cache.redis_store import RedisStore, semantic_name, value_name
from baton.router.response_cache.response_keys import Question

SLACK = 0.01
"""Largest error of a similarity in 8 bits."""
CANDIDATES = 4
"""Nearest questions that a search returns: some may have lost their answers."""
EXPLORED = 64
"""Exploration factor (EF) of a search: with more, the nearest question is found more surely."""
LINKED = 64
"""Exploration factor for adding a question. With Redis's default of 200, adding to a large set
would delay look-ups by 4 ms and more."""
EVICTED_AT_ONCE = 100

_TOUCH = """
local function use(member)
  local now = redis.call('TIME')
  return redis.pcall('ZADD', KEYS[2], now[1] * 1000000 + now[2], member)
end
"""

FIND = (
    _TOUCH
    + """
local found = redis.call('VSIM', KEYS[1], 'FP32', ARGV[1], 'WITHSCORES',
                         'COUNT', ARGV[4], 'EF', ARGV[5])
local answered = {}
for place = 1, #found, 2 do
  local request, score = found[place], tonumber(found[place + 1])
  if score < tonumber(ARGV[2]) then break end
  local value = redis.call('GET', ARGV[6] .. request)
  if value then
    use(ARGV[7] .. request)
    for _, each in ipairs({request, value, redis.call('VGETATTR', KEYS[1], request)}) do
      table.insert(answered, each)
    end
    if score >= tonumber(ARGV[3]) then break end
  else
    redis.call('VREM', KEYS[1], request)
    redis.call('ZREM', KEYS[2], ARGV[7] .. request)
  end
end
return answered
"""
)
"""Returns questions that may be similar enough, up to the first that certainly is. A full Redis
cannot record their use (pcall) but still answers."""

ADD = (
    _TOUCH
    + """
redis.call('VADD', KEYS[1], 'FP32', ARGV[1], ARGV[2], 'Q8', 'EF', ARGV[8],
           'SETATTR', ARGV[1])
redis.call('PEXPIRE', KEYS[1], ARGV[3])
use(ARGV[4] .. ARGV[2])
redis.call('PEXPIRE', KEYS[2], ARGV[3])
local over = redis.call('ZCARD', KEYS[2]) - tonumber(ARGV[5])
if over <= 0 then return 0 end
local oldest = redis.call('ZPOPMIN', KEYS[2], math.min(over, tonumber(ARGV[6])))
for place = 1, #oldest, 2 do
  local scope, request = string.match(oldest[place], '^(%x+)(' .. string.rep('%x', 64) .. ')$')
  redis.call('VREM', ARGV[7] .. scope, request)
end
return #oldest / 2
"""
)


class SimilarQuestion(NamedTuple):
    key: ResponseKey
    similarity: float  # the cosine of the two embeddings
    value: bytes


class SimilarQuestions:
    def __init__(self, store: RedisStore, budget: int) -> None:
        """`budget` is the most questions of one tenant; beyond it, the least recently used is
        evicted."""
        self._store = store
        self._budget = str(budget)

    async def find(self, question: Question, vector: bytes, least: float) -> SimilarQuestion | None:
        """Returns the nearest question that has an answer and a similarity of at least `least`.
        Raises StoreFailed."""
        tenant, scope = question.tenant, question.scope.hex().encode()
        reply = await self._store.look_up(
            *("EVAL", FIND, "2", *_names(question)),
            *(vector, repr(_score(least - SLACK)), repr(_score(least + SLACK))),
            *(str(CANDIDATES), str(EXPLORED)),
            *(value_name(ResponseKey(tenant, b"")), scope),
        )
        assert isinstance(reply, list)
        triples = zip(reply[::3], reply[1::3], reply[2::3], strict=True)
        found = [(cosine(vector, kept), request, value) for request, value, kept in triples]
        if not found or (nearest := max(found))[0] < least:
            return None
        similarity, request, value = nearest
        key = ResponseKey(tenant, bytes.fromhex(request.decode()))
        return SimilarQuestion(key, similarity, self._store.decrypt(value, key))

    async def add(self, question: Question, vector: bytes, key: ResponseKey) -> None:
        """Adds a question whose answer has `key`. Raises StoreFailed."""
        request, scope = key.request.hex().encode(), question.scope.hex().encode()
        await self._store.store(
            *("EVAL", ADD, "2", *_names(question)),
            *(vector, request, self._store.lifetime, scope),
            *(self._budget, str(EVICTED_AT_ONCE), semantic_name(question.tenant, b"")),
            str(LINKED),
        )


def cosine(one: bytes, other: bytes) -> float:
    """Returns the cosine of two float32 vectors."""
    a, b = numpy.frombuffer(one, "<f4"), numpy.frombuffer(other, "<f4")
    return float(a @ b / max(float(numpy.linalg.norm(a) * numpy.linalg.norm(b)), 1e-30))


def _names(question: Question) -> tuple[bytes, bytes]:
    """Returns the keys of the scope's vector set and of the tenant's sorted set of uses."""
    scope = question.scope.hex().encode()
    return semantic_name(question.tenant, scope), semantic_name(question.tenant, b"used")


def _score(similarity: float) -> float:
    """Converts a cosine to Redis's score: 1 for equal, 0 for opposite directions."""
    return (1 + similarity) / 2
