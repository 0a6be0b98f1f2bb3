"""Checkpoints in MXFP4 against transformers' own dequantization."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine_loop import load, serve
from rank_threads import split_engine
from safetensors.torch import load_file, save_file
from tiny_models import generate_with_transformers, save_mxfp4
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from baton.core.errors import InvalidCheckpoint
from baton.engine.quantized_tensor import dequantize_mxfp4

PROMPTS = [[(7 * at * at + at) % 199 for at in range(length)] for length in (1, 6, 70)]


def test_every_byte_with_every_scale_is_dequantized_as_by_transformers() -> None:
    """A scale of 255 stands for no number."""
    blocks = torch.arange(256).byte().repeat(255).view(3, 85, 16, 16)
    scales = torch.arange(255).byte().repeat_interleave(16).view(3, 85, 16)
    found = dequantize_mxfp4("it", blocks, scales)
    wanted = convert_moe_packed_tensors(blocks, scales)
    assert torch.equal(found.contiguous().view(torch.int16), wanted.view(torch.int16))


@pytest.mark.parametrize(("page_size", "chunk"), [(1, 7), (16, 64)])
def test_a_checkpoint_answers_as_in_transformers(
    page_size: int, chunk: int, tmp_path: Path
) -> None:
    oracle = save_mxfp4(tmp_path)
    expected = [generate_with_transformers(oracle, prompt, 12) for prompt in PROMPTS]
    assert serve(load(tmp_path, page_size), PROMPTS, 12, chunk) == expected


def test_two_ranks_share_dequantized_experts(tmp_path: Path) -> None:
    oracle = save_mxfp4(tmp_path / "model")
    expected = [generate_with_transformers(oracle, prompt, 12) for prompt in PROMPTS]
    with split_engine(tmp_path / "model", 2, tmp_path) as split:
        assert serve(split.engine, PROMPTS, 12, chunk=16) == expected


NAME = "model.layers.1.mlp.experts.down_proj"


@pytest.mark.parametrize(
    ("scales", "message"),
    [
        (None, f"{NAME}_scales is missing"),
        (torch.zeros(6, 64, 4, dtype=torch.uint8), "blocks .* scales .6, 64, 4. of torch.uint8"),
        (torch.zeros(6, 64, 3), "not in MXFP4: .* of torch.float32"),
    ],
    ids=["missing", "too many", "numbers"],
)
def test_scales_that_do_not_fit_are_named(
    scales: Tensor | None, message: str, tmp_path: Path
) -> None:
    save_mxfp4(tmp_path)
    held = load_file(tmp_path / "model-2.safetensors")
    del held[f"{NAME}_scales"]
    if scales is not None:
        held[f"{NAME}_scales"] = scales
    save_file(held, tmp_path / "model-2.safetensors")
    with pytest.raises(InvalidCheckpoint, match=message):
        load(tmp_path)


def test_blocks_of_another_size_are_named(tmp_path: Path) -> None:
    save_mxfp4(tmp_path)
    held = [load_file(tmp_path / f"model-{file}.safetensors") for file in (1, 2)]
    for tensors, part in zip(held, ("blocks", "scales"), strict=True):
        tensors[f"{NAME}_{part}"] = tensors[f"{NAME}_{part}"][:, :, :2].contiguous()
    for file, tensors in enumerate(held, start=1):
        save_file(tensors, tmp_path / f"model-{file}.safetensors")
    with pytest.raises(
        InvalidCheckpoint, match=r"down_proj has shape \[6, 64, 64\].*\[6, 96, 64\]"
    ):
        load(tmp_path)
