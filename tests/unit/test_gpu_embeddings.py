"""Embeddings by the GPU's runner against transformers: interpreted here, compiled on a GPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gpu_ranks import gpu_runner, two_ranks
from tiny_models import TINY_MODELS, save
from transformers import PreTrainedModel

from baton.core.types import AttemptKey, Pooling, Sampling, Work
from baton.engine.gpu.runner import GpuRunner
from baton.engine.page_groups import make_pool
from baton.engine.sequence import Sequence

pytestmark = pytest.mark.usefixtures("few_programs")

PAGES, PAGE_SIZE = 64, 4
LONG = [5, 3, 8, 120, 44]
WANTED = [
    (LONG, Pooling.MEAN, None),
    (LONG[:4], None, 1),  # scored, in company
    (LONG[::-1], Pooling.LAST, None),
    (LONG[:1], Pooling.MEAN, None),
]


def compare(runner: GpuRunner, oracle: PreTrainedModel, chunk: int) -> None:
    pool = make_pool(PAGES, PAGE_SIZE, (None,))
    sequences = []
    for number, (prompt, pooling, logprobs) in enumerate(WANTED):
        key = AttemptKey(str(number), 1)
        work = Work(
            key, prompt, Sampling(), 1, frozenset(), prompt_logprobs=logprobs, pooling=pooling
        )
        pages = pool.pages_for(len(prompt) + 1)
        sequences.append(Sequence(work, pool.acquire(pages)))
        sequences[-1].lease.cover(pages)
    while left := [each for each in sequences if each.generated == 0]:
        plan = {each: min(chunk, each.uncomputed) for each in left}
        for sequence, token in zip(plan, runner.launch(plan).wait(), strict=True):
            if token is not None:
                assert isinstance(token, int), token
                sequence.append(token)
    assert len(sequences[1].prompt_scores) == 3
    for sequence, (prompt, pooling, _) in zip(sequences, WANTED, strict=True):
        if sequence.pooled is None:
            continue
        with torch.no_grad():
            hidden = oracle.model(torch.tensor([prompt])).last_hidden_state[0].double()
        expected = hidden.mean(0) if pooling is Pooling.MEAN else hidden[-1]
        found = np.frombuffer(sequence.pooled.embedding, "<f4")
        assert np.abs(found - expected.numpy()).max() < 1e-5


@pytest.mark.parametrize(
    ("name", "chunk"), [("llama", 1), ("llama", 4), ("llama", 100), ("deepseek-v2-lite", 4)]
)
def test_embeddings_are_transformers_in_chunks_of_any_size(
    tmp_path: Path, device: torch.device, name: str, chunk: int
) -> None:
    oracle = save(TINY_MODELS[name].changed(num_hidden_layers=2), tmp_path)
    compare(gpu_runner(tmp_path, str(device), PAGES, PAGE_SIZE), oracle, chunk)


def test_embeddings_of_two_ranks_are_transformers(tmp_path: Path, device: torch.device) -> None:
    """In chunks of one token too, which ranks would otherwise follow to logits."""
    oracle = save(TINY_MODELS["llama"].changed(num_hidden_layers=2), tmp_path / "model")
    with two_ranks(tmp_path / "model", str(device), PAGES, PAGE_SIZE, tmp_path) as runner:
        for chunk in (1, 4):
            compare(runner, oracle, chunk)
