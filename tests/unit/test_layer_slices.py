from __future__ import annotations

import pytest

from baton.core.page_reach import Window, cut_layers, first_page


def pattern(layers: int, every: int, window: int = 1024) -> list[Window]:
    """Each `every`-th layer has no window."""
    return [None if (layer + 1) % every == 0 else window for layer in range(layers)]


MODELS: dict[str, tuple[list[Window], int, list[Window]]] = {
    "llama": ([None] * 32, 32, [None]),
    "mistral": ([4096] * 32, 32, [4096]),
    "gemma 2, 2b": (pattern(26, 2), 13, [None, 1024]),
    "gemma 3, 1b": (pattern(26, 6), 2, [None] * 2 + [1024] * 11),
    "gemma 3, 4b": (pattern(34, 6), 5, [None] + [1024] * 6),
    "gemma 3, 12b": (pattern(48, 6), 8, [None] + [1024] * 5),
    "gemma 3, 27b": (pattern(62, 6), 5, [None] * 2 + [1024] * 11),
    "two windows": ([8, 4] * 3, 3, [8, 4]),
}


@pytest.mark.parametrize("name", MODELS)
def test_slices_have_equally_many_layers_of_one_window(name: str) -> None:
    windows, layers, of_slices = MODELS[name]
    cut = cut_layers(windows)
    assert (cut.layers, list(cut.windows)) == (layers, of_slices)
    assert len(set(cut.places)) == len(windows), "each layer has a place of its own"
    for window, (number, place) in zip(windows, cut.places, strict=True):
        assert cut.windows[number] == window
        assert place < layers


def test_the_first_page_in_reach_holds_the_first_token_that_is_seen() -> None:
    for window in (1, 2, 7):
        for tokens in range(40):
            first = max(0, tokens - window + 1)
            assert first_page(window, tokens, 4) == first // 4
    assert first_page(None, 1000, 4) == 0
