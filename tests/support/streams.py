"""Answers that have begun, and where."""

from __future__ import annotations

from baton import AsyncClient, AsyncStream


async def begin(
    client: AsyncClient, prompt: list[int], tokens: int = 3, **options: float | bool
) -> tuple[AsyncStream, str]:
    """A stream of which `tokens` have come, and the only decode worker in use.

    The router's own count says so at once; a worker's load waits for its next report, by which a
    short answer may have ended.
    """
    stream = client.stream(prompt, **options)
    for _ in range(tokens):
        await anext(stream)
    workers = [each for each in (await client.status()).workers if each.active_requests]
    names = [each.member.worker_id for each in workers]
    (name,) = [name for name in names if name.startswith("decode")]
    return stream, name
