"""Samples tokens on the device; the host does not see the logits."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from baton.engine.sampler import adjust, draw_keys, is_adjusted, is_greedy, to_device
from baton.engine.sequence import Sequence
from baton.kernels.gpu.sampling import argmax, sample

ADJUSTED_ROWS = 32
"""Rows with adjusted logits sampled together: each takes at most 64 bytes per token."""


class GpuSampler:
    def __init__(self, vocabulary_size: int) -> None:
        self.vocabulary_size = vocabulary_size

    def sample(self, logits: Tensor, sequences: list[Sequence]) -> Tensor:
        """logits [n, V] -> [n], int32; -1 where the logits are not finite."""
        logits = logits[:, : self.vocabulary_size]
        adjusted = [row for row, each in enumerate(sequences) if is_adjusted(each)]
        if not adjusted:
            return self._choose(logits, sequences)
        tokens = torch.empty(len(sequences), dtype=torch.int32, device=logits.device)
        others = sorted(set(range(len(sequences))) - set(adjusted))
        if others:
            where = _row_indices(others, logits.device)
            tokens[where] = self._choose(logits[where], [sequences[row] for row in others])
        for start in range(0, len(adjusted), ADJUSTED_ROWS):
            rows = adjusted[start : start + ADJUSTED_ROWS]
            where, chosen = _row_indices(rows, logits.device), [sequences[row] for row in rows]
            scores = logits[where].float()
            adjust(scores, chosen)
            tokens[where] = self._choose(scores, chosen)
        return tokens

    def _choose(self, logits: Tensor, sequences: list[Sequence]) -> Tensor:
        if all(is_greedy(sequence.work.sampling) for sequence in sequences):
            return argmax(logits)
        return self._draw(logits, sequences)

    def _draw(self, logits: Tensor, sequences: list[Sequence]) -> Tensor:
        columns = [
            (
                sequence.work.sampling.temperature,
                sequence.work.sampling.top_k,
                sequence.work.sampling.top_p,
                sequence.work.sampling.min_p,
            )
            for sequence in sequences
        ]
        host = torch.from_numpy(np.asarray(columns, dtype=np.float64).T.copy())
        temperature, top_k, top_p, min_p = to_device(host, logits.device)
        keys = to_device(torch.tensor(draw_keys(sequences)), logits.device)
        return sample(logits, temperature.float(), top_k.int(), top_p, min_p.float(), keys)


def _row_indices(rows: list[int], device: torch.device) -> Tensor:
    return to_device(torch.tensor(rows), device)
