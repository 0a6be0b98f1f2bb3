"""The end of a step: tokens from logits, without the host seeing the logits."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from engine.sampler import Sampler, takes_best, uniform
from engine.sequence import Sequence
from kernels.gpu.sampling import argmax, sample

HOST_ROWS = 32
"""Rows with penalties that are sampled together: each takes 64 bytes a token of the vocabulary."""


class GpuSampler:
    """Penalties are the host's: they need the tokens of all steps before."""

    def __init__(self, vocabulary_size: int) -> None:
        self._vocabulary_size = vocabulary_size
        self._host = Sampler(vocabulary_size)

    def sample(self, logits: Tensor, sequences: list[Sequence]) -> Tensor:
        """logits [n, V] -> [n], int32; -1 where the logits are not finite."""
        logits = logits[:, : self._vocabulary_size]
        penalized = [row for row, s in enumerate(sequences) if s.work.sampling.penalizes]
        if not penalized:
            return self._choose(logits, sequences)
        tokens = torch.empty(len(sequences), dtype=torch.int32, device=logits.device)
        others = [row for row in range(len(sequences)) if row not in set(penalized)]
        if others:
            tokens[others] = self._choose(logits[others], [sequences[row] for row in others])
        for start in range(0, len(penalized), HOST_ROWS):
            rows = penalized[start : start + HOST_ROWS]
            found = self._host.sample(logits[rows], [sequences[row] for row in rows])
            tokens[rows] = torch.tensor(found, dtype=torch.int32).to(logits.device)
        return tokens

    def _choose(self, logits: Tensor, sequences: list[Sequence]) -> Tensor:
        if all(takes_best(sequence.work.sampling) for sequence in sequences):
            return argmax(logits)
        return self._draw(logits, sequences)

    def _draw(self, logits: Tensor, sequences: list[Sequence]) -> Tensor:
        columns = [
            (
                sequence.work.sampling.temperature,
                sequence.work.sampling.top_k,
                sequence.work.sampling.top_p,
                sequence.work.sampling.min_p,
                uniform(sequence.work.sampling.seed, len(sequence.tokens) + sequence.expected),
            )
            for sequence in sequences
        ]
        host = torch.from_numpy(np.asarray(columns, dtype=np.float64).T.copy())
        if logits.device.type == "cuda":
            host = host.pin_memory()
        temperature, top_k, top_p, min_p, chance = host.to(logits.device, non_blocking=True)
        return sample(logits, temperature.float(), top_k.int(), top_p, min_p.float(), chance)
