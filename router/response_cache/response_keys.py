"""Keys of responses: digests of the tenant and of everything that answers depend on.

Another tenant or cache salt has other keys, so a look-up cannot find its answers. Only requests
with repeatable answers have a key: greedy ones, and those with the caller's seed.

A question is the last message of a chat. Its scope is everything else that decides the answer: only
questions of one scope are compared.
"""

from __future__ import annotations

from array import array
from dataclasses import replace
from hashlib import blake2b
from typing import NamedTuple

from baton.core.types import Caching, ChatPrompt, Request, Work
from baton.router.response_cache.cache_store import ResponseKey

_DIGEST_BYTES = 32


class Question(NamedTuple):
    text: str
    tenant: bytes
    scope: bytes


def tenant_digest(tenant: str) -> bytes:
    return blake2b(tenant.encode(), digest_size=16, person=b"baton-tenant").digest()


def response_key(request: Request, work: Work, model: bytes) -> ResponseKey | None:
    """Returns a request's key; None if its answers are not repeatable, the model is unknown or the
    caller wants no caching."""
    repeatable = (work.sampling.greedy or request.seeded) and request.pooling is None
    if not repeatable or not model or request.caching is Caching.NEVER:
        return None
    tenant = tenant_digest(request.tenant)
    model += work.adapter_digest
    tokens = array("I", work.prompt_tokens).tobytes()
    decisive = _decisive(request, work, work.max_tokens)
    digest = _digest(b"baton-response", tenant, model, decisive, tokens)
    return ResponseKey(tenant, digest)


def question_of(request: Request, work: Work, model: bytes, embedder: bytes) -> Question | None:
    """Returns what the semantic cache compares, for a request that has a response key. None if only
    the same request may get its answer: tools, structures, logprobs, several answers, no chat."""
    chat = request.prompt
    single = request.n == 1 and request.logprobs is None and request.prompt_logprobs is None
    if not isinstance(chat, ChatPrompt) or not single or chat.tools or work.grammar:
        return None
    last = chat.messages[-1]
    if last.role != "user" or chat.end != "open" or not last.content.strip():
        return None
    context = replace(chat, messages=(*chat.messages[:-1], replace(last, content="")))
    # Not `work.max_tokens`: without the caller's limit, it depends on the question's length.
    decisive = _decisive(request, work, request.max_tokens or 0)
    decisive += repr(request.truncate_prompt_tokens).encode()
    tenant = tenant_digest(request.tenant)
    model += work.adapter_digest
    parts = (tenant, model, embedder, decisive, repr(context).encode(errors="surrogatepass"))
    return Question(last.content, tenant, _digest(b"baton-scope", *parts))


def _decisive(request: Request, work: Work, max_tokens: int) -> bytes:
    """Returns what decides answers besides the prompt, the model and the tenant."""
    sampling = work.sampling
    chat = request.prompt if isinstance(request.prompt, ChatPrompt) else None
    values = (
        request.cache_salt,
        request.n,
        request.max_tokens == 0,
        request.stop,
        request.skip_special_tokens,
        [tool.name for tool in chat.callable_tools] if chat else None,
        # Greedy answers are the same for all seeds.
        replace(sampling, seed=0) if sampling.greedy and sampling.seed else sampling,
        max_tokens,
        sorted(work.stop_token_ids),
        work.logprobs,
        work.prompt_logprobs,
        work.grammar,
    )
    return repr(values).encode()


def _digest(person: bytes, *parts: bytes) -> bytes:
    digest = blake2b(digest_size=_DIGEST_BYTES, person=person)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()
