"""Attention windows and pages: cuts layers into slices by their windows, and computes how far back
a window reaches.

A group is the layers with one window. Its layers are cut into slices of equally many layers,
and a page holds the keys and values of one slice. So the pages of all groups have one size and
come from one pool, whatever share of it each group needs, and a page that no window of its
group reaches is returned while its sequence still runs. Layers that all have one window are one
slice.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Window = int | None
"""A token sees itself and window - 1 tokens before it; None: all tokens before it."""

SPARE_SHARE = 16
"""At most one in SPARE_SHARE of a group's places for layers is unused."""


@dataclass(frozen=True, slots=True)
class LayerSlices:
    layers: int  # of one slice; the last slice of a group may use fewer
    windows: tuple[Window, ...]  # of each slice, the widest first
    places: tuple[tuple[int, int], ...]  # of each layer: its slice, and its place there


def cut_layers(windows: Sequence[Window]) -> LayerSlices:
    """Cuts layers with these windows into slices."""
    groups: dict[Window, list[int]] = {}
    for layer, window in enumerate(windows):
        groups.setdefault(window, []).append(layer)
    widest_first = sorted(groups.items(), key=lambda group: -(group[0] or math.inf))
    size = _layers_of_slice([len(layers) for layers in groups.values()])
    of_slices: list[Window] = []
    places: dict[int, tuple[int, int]] = {}
    for window, layers in widest_first:
        for index, layer in enumerate(layers):
            places[layer] = (len(of_slices) + index // size, index % size)
        of_slices += [window] * -(-len(layers) // size)
    return LayerSlices(
        size, tuple(of_slices), tuple(places[layer] for layer in range(len(windows)))
    )


def _layers_of_slice(groups: list[int]) -> int:
    """The largest number of layers per slice that leaves few places of any group unused."""
    return next(
        size
        for size in range(max(groups), 0, -1)
        if all(SPARE_SHARE * (-count % size) <= count for count in groups)
    )


def windows_of(stated: Iterable[int]) -> tuple[Window, ...]:
    """The windows of a pool's slices from its layout, where 0 is no window. An empty layout has one
    slice without a window."""
    return tuple(window or None for window in stated) or (None,)


def pages_held(tokens: float, page_size: int, windows: Iterable[Window]) -> float:
    """Pages that a sequence of `tokens` tokens holds. Each slice has pages of its own."""
    return sum(min(tokens, window or tokens) for window in windows) / page_size


def first_page(window: Window, tokens: int, page_size: int) -> int:
    """The first page that a query at position `tokens`, or a later one, sees."""
    return 0 if window is None else max(0, tokens - window + 1) // page_size


def first_kept(window: Window, tokens: int, page_size: int) -> int:
    """The first page to keep of a sequence of `tokens` tokens: its next tokens may see it, or those
    of a sequence that continues after its last full page."""
    return first_page(window, tokens // page_size * page_size, page_size)
