"""The processes that share a worker's model: they answer together, and none outlives another."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from engine_loop import answer
from rank_leader import Leader
from tiny_models import TINY_MODELS, generate_with_transformers, save

from baton.core.errors import InvalidConfig

PROMPT = list(range(1, 60))


def test_two_processes_answer_as_transformers_does_until_one_is_killed(tmp_path: Path) -> None:
    oracle = save(TINY_MODELS["qwen3"], tmp_path / "model")
    leader = Leader(tmp_path / "model", second_tier=True)
    try:
        engine = leader.load()
        expected = generate_with_transformers(oracle, PROMPT, 20)
        assert answer(engine, PROMPT, 20) == expected
        leader.check_rows(engine)
        assert leader.lost.empty()
        assert leader.ranks.lost() is None
        (follower,) = leader.ranks.pids
        os.kill(follower, signal.SIGKILL)
        with pytest.raises((RuntimeError, OSError)):
            answer(engine, PROMPT, 20)
        # The step may fail before the exit status is known: who asks for the reason waits for it.
        reason = leader.ranks.lost(10)
        assert reason is not None
        assert reason.message == "rank-1 of this worker has ended (-9)"
        assert leader.lost.get(timeout=10) is reason
    finally:
        leader.ranks.close()


def test_a_rank_that_cannot_load_says_why_and_ends_with_the_others(tmp_path: Path) -> None:
    leader = Leader(tmp_path)
    with pytest.raises(InvalidConfig, match="config"):
        leader.ranks.group.connect(torch.device("cpu"))
    leader.ranks.close()
    assert leader.lost.empty()
    assert not any(Path(f"/proc/{pid}").exists() for pid in leader.ranks.pids)
