"""The pages that one decode step gathered, kept for the next.

Gathering scattered pages costs a CPU about a tenth of a decode step. While the
same sequences decode on, one token each, what was gathered stays true, and only
their new tokens have to be added. Any other step gathers anew.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from engine.sequence import Sequence

SPARE_PAGES = 4
"""Pages gathered beyond the longest sequence's, so that it can grow into them."""

BUDGET = 512 * 2**20
"""Bytes that may be kept; a larger batch gathers at every step."""


@dataclass(slots=True)
class KeptPages:
    """`token_bytes` of keys and values a token, over all layers; `page_size` tokens a page."""

    token_bytes: int
    page_size: int
    pages: int = 0  # of each sequence, in every layer's tensor
    layers: list[Tensor] = field(default_factory=list)
    _sequences: list[Sequence] = field(default_factory=list)
    _computed: list[int] = field(default_factory=list)

    def follows(self, sequences: list[Sequence]) -> bool:
        """Whether the step over `sequences` is the next one of those that were kept.

        Either way it is the one to be followed from now on.
        """
        computed = [sequence.computed for sequence in sequences]
        same = len(sequences) == len(self._sequences) and all(
            sequence is kept and now == before + 1
            for sequence, kept, now, before in zip(
                sequences, self._sequences, computed, self._computed, strict=True
            )
        )
        self._sequences, self._computed = sequences, computed
        return same and max(computed) < self.pages * self.page_size

    def start(self, longest: int, layers: int) -> bool:
        """Makes room for sequences of up to `longest` pages. False when that is too much."""
        self.pages = longest + SPARE_PAGES
        tokens = self.pages * self.page_size * len(self._sequences)
        fits = tokens * self.token_bytes <= BUDGET
        self.layers = [Tensor()] * layers if fits else []
        if not fits:
            self._sequences = []
        return fits
