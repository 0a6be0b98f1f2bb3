from __future__ import annotations

from baton.core.types import FinishReason, Logprobs
from baton.router.requests.attempt import Tokens, merged


def scores(token: int) -> tuple[Logprobs, ...]:
    return (Logprobs(-0.5 * token, (token,), (-0.5 * token,)),)


def test_merged_tokens_keep_everything() -> None:
    first = Tokens([7], None, 16, scores(7), 8)
    rest = [Tokens([8], None, 0, scores(8)), Tokens([9], FinishReason.STOP, 0, scores(9))]
    together = Tokens([7, 8, 9], FinishReason.STOP, 16, scores(7) + scores(8) + scores(9), 8)
    assert merged([first, *rest]) == together
    assert merged([first]) is first
