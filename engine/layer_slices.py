"""How a model's layers are cut into slices, one page each.

A group is the layers with one window. Its layers are cut into slices of equally many layers,
and a page holds the keys and values of one slice. So the pages of all groups have one size and
come from one pool, whatever share of it each group needs, and a page that no window of its
group reaches is given back while its sequence still runs. Layers that are all alike are one
slice.

Needs no torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from baton.core.page_reach import Window

SPARE_SHARE = 16
"""At most one in SPARE_SHARE of a group's places for layers is unused."""


@dataclass(frozen=True, slots=True)
class LayerSlices:
    layers: int  # of one slice; the last slice of a group may use fewer
    windows: tuple[Window, ...]  # of each slice, the widest first
    places: tuple[tuple[int, int], ...]  # of each layer: its slice, and its place there


def cut_layers(windows: Sequence[Window]) -> LayerSlices:
    """The slices of a model whose layers have these windows."""
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
    """The most layers of a slice that leave few places of any group unused."""
    return next(
        size
        for size in range(max(groups), 0, -1)
        if all(SPARE_SHARE * (-count % size) <= count for count in groups)
    )
