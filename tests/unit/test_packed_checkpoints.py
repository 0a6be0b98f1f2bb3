"""Checkpoints whose integers stay packed on a GPU, beside the same ones dequantized."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from engine_loop import serve
from gpu_ranks import engine_of, gpu_runner
from quantized_models import PLAIN, save_quantized
from tiny_models import TINY_MODELS, choices_of_transformers
from torch import Tensor

from baton.engine.architecture import Split, read_architecture
from baton.engine.checkpoint import Checkpoint
from baton.engine.model import Model
from baton.engine.tensor_parallel import Group
from baton.engine.weight_codes import packs
from baton.engine.weights import load_model
from baton.kernels.experts import MLP
from baton.kernels.linear import AnyLinear
from baton.kernels.packed import PackedWeight

GROUP = 32
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_key_value_heads": 2}
PLAIN_LAYER = int(PLAIN.split(".")[2])
INTEGERS = ["int4", "int4-asymmetric", "int8", "int8-asymmetric", "int8-packed", "awq", "gptq-v2"]


def loaded(
    folder: Path, dtype: torch.dtype, group: Group | None = None, *, packed: bool, balanced: bool
) -> Model:
    shape = read_architecture(folder)
    source = Checkpoint(folder, quantization=shape.quantization)
    return load_model(source, shape, dtype, "cpu", group, packed=packed, balanced=balanced)


def linears(model: Model) -> Iterator[tuple[str, AnyLinear]]:
    for index, layer in enumerate(model.layers):
        yield f"qkv {index}", layer.qkv
        yield f"output {index}", layer.output
        if isinstance(layer.mlp, MLP):
            yield from ((f"up {index}", layer.mlp.gate_up), (f"down {index}", layer.mlp.down))


def compare(folder: Path, dtype: torch.dtype, group: Group | None = None, **kept: bool) -> set[str]:
    """Which linear layers are packed; all are what they are dequantized."""
    balanced = kept.get("balanced", False)
    found = loaded(folder, dtype, group, packed=True, balanced=balanced)
    wanted = dict(linears(loaded(folder, dtype, group, packed=False, balanced=balanced)))
    packed = set()
    for name, linear in linears(found):
        weight = linear.kept
        if isinstance(weight, PackedWeight):
            packed.add(name)
            weight = weight.numbers()
        assert isinstance(weight, Tensor)
        assert torch.equal(weight, wanted[name].weight), name
    return packed


def all_but_one(model: str = "qkv output up down", layers: int = 3) -> set[str]:
    every = {f"{name} {index}" for name in model.split() for index in range(layers)}
    return every - {f"output {PLAIN_LAYER}"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", INTEGERS)
def test_codes_stay_where_their_groups_are_of_neighbours(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    save_quantized(name, tmp_path, TINY_MODELS["llama"].changed(**SIZES), GROUP)
    assert compare(tmp_path, dtype) == all_but_one()


def test_keys_are_balanced_with_their_codes(tmp_path: Path) -> None:
    save_quantized("awq", tmp_path, TINY_MODELS["llama"].changed(**SIZES), GROUP)
    assert compare(tmp_path, torch.bfloat16, balanced=True) == all_but_one()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_keeps_its_part_of_the_codes(rank: int, tmp_path: Path) -> None:
    save_quantized("int4-asymmetric", tmp_path, TINY_MODELS["phi3"].changed(**SIZES), GROUP)
    group = Group(Split(rank, 2), tmp_path / "meeting")
    assert compare(tmp_path, torch.bfloat16, group) == all_but_one()


@pytest.mark.parametrize(
    ("family", "name", "group", "sizes", "packed"),
    [
        ("llama", "int4", 8, SIZES, set()),  # several scales for the inputs of a word
        ("llama", "int4-act-order", GROUP, SIZES, set()),
        ("llama", "fp8", GROUP, SIZES, set()),
        ("llama", "int8", GROUP, {**SIZES, "intermediate_size": 144}, all_but_one("qkv output up")),
        ("mixtral", "awq", GROUP, SIZES, all_but_one("qkv output")),
        ("gemma3", "mixed", GROUP, SIZES, all_but_one("up down")),
    ],
)
def test_what_cannot_be_packed_is_dequantized(
    family: str,
    name: str,
    group: int,
    sizes: dict[str, int],
    packed: set[str],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    save_quantized(name, tmp_path, TINY_MODELS[family].changed(**sizes), group)
    layers = read_architecture(tmp_path).layers
    assert compare(tmp_path, torch.bfloat16) == {
        each for each in packed if int(each.split()[1]) < layers
    }
    assert "dequantized: " in caplog.text


def test_devices_that_add_up_in_another_order_do_not_pack() -> None:
    assert not packs("cpu", torch.bfloat16)
    assert not packs("cuda", torch.float32)


@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize(("family", "name"), [("llama", "awq"), ("gemma3", "int8")])
def test_a_model_answers_by_its_codes(
    device: torch.device, family: str, name: str, tmp_path: Path
) -> None:
    oracle = save_quantized(name, tmp_path, TINY_MODELS[family].changed(**SIZES), GROUP)
    runner = gpu_runner(tmp_path, str(device), 64, 4, packed=True)
    assert any(isinstance(each.kept, PackedWeight) for _, each in linears(runner._forward._model))
    prompts = [[(7 * at * at + at) % 199 for at in range(length)] for length in (3, 12)]
    answers = serve(engine_of(runner, tmp_path, 64, 4), prompts, 5, chunk=16)
    assert answers == choices_of_transformers(oracle, prompts, answers)
