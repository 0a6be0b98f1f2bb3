"""Weights that pass through staging buffers on their way to a device arrive as they are stored."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tiny_models import TINY_MODELS, save

from baton.core.errors import InvalidCheckpoint
from baton.engine.architecture import Split, read_architecture
from baton.engine.checkpoint import Checkpoint, Cut
from baton.engine.gpu import upload
from baton.engine.gpu.upload import Upload
from baton.engine.model import Model
from baton.engine.tensor_parallel import Group
from baton.engine.weights import load_model
from baton.kernels.experts import MLP

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of these tests take several pieces, and pieces several threads."""
    monkeypatch.setattr(upload, "BUFFER_BYTES", 4096)
    monkeypatch.setattr(upload, "SHARED_BYTES", 1024)
    monkeypatch.setattr(upload, "THREADS", 3)


def stored(folder: Path, **tensors: torch.Tensor) -> Checkpoint:
    save_file(tensors, folder / "model.safetensors")
    return Checkpoint(folder, upload=Upload(DEVICE))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1,), (700,), (3, 5), (70, 64), (2, 90, 31), (3, 2, 5000)])
def test_a_tensor_of_any_shape_and_type_is_copied_whole(
    tmp_path: Path, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    tensor = torch.randn(shape).to(dtype)
    checkpoint = stored(tmp_path, weight=tensor)
    for_bfloat16 = torch.zeros(shape, dtype=torch.bfloat16, device=DEVICE)
    checkpoint.copy("weight", for_bfloat16)
    checkpoint.finish()
    assert torch.equal(for_bfloat16.cpu(), tensor.to(torch.bfloat16))


@pytest.mark.parametrize("dimension", [0, 1])
def test_a_rank_gets_its_part_in_its_place_of_a_larger_buffer(
    tmp_path: Path, dimension: int
) -> None:
    tensor = torch.randn(96, 128)
    checkpoint = stored(tmp_path, weight=tensor)
    part = tensor.narrow(dimension, 32, 32)
    buffer = torch.zeros(3 * len(part), part.shape[1], device=DEVICE)
    mine = slice(len(part), 2 * len(part))
    checkpoint.copy(
        "weight", buffer[mine], cut=Cut(dimension, tensor.shape[dimension], ((32, 32),))
    )
    checkpoint.finish()
    assert torch.equal(buffer[mine].cpu(), part)
    assert not buffer[: len(part)].any()
    assert not buffer[2 * len(part) :].any()


def test_a_tensor_of_whole_numbers_or_of_another_shape_is_refused(tmp_path: Path) -> None:
    checkpoint = stored(tmp_path, ids=torch.arange(4), weight=torch.ones(2, 3))
    with pytest.raises(InvalidCheckpoint, match=r"ids is torch\.int64, not a float"):
        checkpoint.copy("ids", torch.zeros(4, device=DEVICE))
    with pytest.raises(InvalidCheckpoint, match=r"weight has shape \[2, 3\]"):
        checkpoint.copy("weight", torch.zeros(3, 2, device=DEVICE))


def test_a_file_that_ends_early_is_refused(tmp_path: Path) -> None:
    save_file({"weight": torch.ones(1000)}, tmp_path / "model.safetensors")
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:-8])
    with pytest.raises(InvalidCheckpoint, match="is not a safetensors file"):
        Checkpoint(tmp_path, upload=Upload(DEVICE))


@pytest.mark.parametrize("name", ["llama", "qwen3"])
@pytest.mark.parametrize("split", [Split(), Split(0, 2), Split(1, 2)])
def test_a_model_has_the_weights_that_it_has_without_an_upload(
    tmp_path: Path, name: str, split: Split
) -> None:
    save(TINY_MODELS[name], tmp_path)
    shape = read_architecture(tmp_path)
    group = Group(split, tmp_path / "meeting") if split.size > 1 else None
    plain = load_model(Checkpoint(tmp_path), shape, torch.bfloat16, "cpu", group)
    through = Checkpoint(tmp_path, upload=Upload(DEVICE))
    uploaded = load_model(through, shape, torch.bfloat16, str(DEVICE), group)
    for mine, theirs in zip(weights(uploaded), weights(plain), strict=True):
        assert torch.equal(mine.cpu(), theirs)


def weights(model: Model) -> list[torch.Tensor]:
    """All of them, in order."""
    found = [model.embedding, model.norm.weight, model.head.weight]
    for layer in model.layers:
        assert isinstance(layer.mlp, MLP)
        norms = (layer.attention_norm, layer.mlp_norm, layer.query_norm, layer.key_norm)
        found += [norm.weight for norm in norms if norm]
        linears = (layer.qkv, layer.output, layer.mlp.gate_up, layer.mlp.down)
        found += [linear.weight for linear in linears]
    return found
