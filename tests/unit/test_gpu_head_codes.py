"""Keys and values as codes on a GPU: what is stored, gathered and attended."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from gpu_ranks import gpu_runner
from test_gpu_attention import LAYERS, Heads, Pool
from test_gpu_runner import PAGE_SIZE, PAGES, answers
from tiny_models import TINY_MODELS, VOCABULARY, save
from torch import Tensor
from torch.nn import functional

from baton.core.types import Sampling
from baton.engine.architecture import read_architecture
from baton.engine.checkpoint import Checkpoint
from baton.engine.empty_pages import stored_dtype
from baton.engine.model_choice import KvDtype, stored_shape
from baton.engine.runner import Runner
from baton.engine.weights import load_model
from baton.kernels import GPU_SCALE_BYTES, SCALE_BYTES
from baton.kernels.fp8 import FP8, LEAST_PEAK, MOST
from baton.kernels.gpu.chunk_attention import attend_anywhere
from baton.kernels.gpu.decode_attention import decode_attention
from baton.kernels.gpu.head_codes import CODES
from baton.kernels.gpu.pages import gather_tokens
from baton.kernels.gpu.rotary import Projected, rotate_and_store
from baton.kernels.gpu.splits import SplitWorkspace
from baton.kernels.half_bytes import half_byte_codes, half_byte_numbers
from baton.kernels.head_sizes import PAIR_BYTES, gpu_half, gpu_stored_bytes, groups_of
from baton.kernels.integers import head_codes

PAGE = 5
LENGTHS = [150, 9]


def encoded(heads: Tensor, code: torch.dtype) -> Tensor:
    """heads [..., dim] -> bytes of the last dimension of GPU's pages."""
    device, heads = heads.device, heads.float().cpu()  # a GPU divides by a constant in two steps
    if code == torch.uint8:
        return _in_halves(heads).to(device)
    if code == torch.int8:
        stored = head_codes(heads).view(torch.uint8)
    else:
        peaks = heads.abs().amax(dim=-1, keepdim=True).clamp(min=LEAST_PEAK)
        codes = (heads * (torch.full_like(peaks, MOST) / peaks)).to(FP8)
        stored = torch.cat((codes.view(torch.uint8), (peaks / MOST).view(torch.uint8)), dim=-1)
    return functional.pad(stored, (0, GPU_SCALE_BYTES - SCALE_BYTES)).to(device)


def _in_halves(heads: Tensor) -> Tensor:
    """heads [..., dim] -> [..., gpu_stored_bytes(dim)]: codes of padded halves, then the rest."""
    dim, half = heads.shape[-1], gpu_half(heads.shape[-1])
    found = half_byte_codes(heads)
    codes = torch.cat((found[..., : dim // 2] & 15, found[..., : dim // 2] >> 4), dim=-1)
    codes = functional.pad(codes, (0, 2 * half - dim))
    stored = torch.cat((codes[..., :half] | codes[..., half:] << 4, found[..., dim // 2 :]), dim=-1)
    return functional.pad(stored, (0, gpu_stored_bytes(dim) - stored.shape[-1]))


def _of_halves(kv: Tensor, dim: int) -> Tensor:
    half = gpu_half(dim)
    codes = torch.cat((kv[..., :half] & 15, kv[..., :half] >> 4), dim=-1)[..., :dim]
    packed = codes[..., : dim // 2] | codes[..., dim // 2 :] << 4
    behind = kv[..., half : half + groups_of(dim) * PAIR_BYTES]
    return half_byte_numbers(torch.cat((packed, behind), dim=-1))


def decoded(kv: Tensor, dim: int) -> Tensor:
    """kv [..., bytes of a head] -> [..., dim], float32."""
    if kv.dtype == torch.uint8:
        return _of_halves(kv, dim)
    size = kv.shape[-1] - GPU_SCALE_BYTES
    scales = kv[..., size : size + SCALE_BYTES].contiguous().view(torch.float32)
    return kv[..., :size].float() * scales


class Coded:
    """A pool of random pages, and the same in codes."""

    def __init__(self, device: torch.device, code: torch.dtype, heads: Heads) -> None:
        self.pool = Pool(device, torch.float32, heads, PAGE, LENGTHS)
        self.kv = encoded(self.pool.kv, code).view(code)
        self.shape = heads.shape_on(device)

    @property
    def numbers(self) -> Tensor:
        """Pages of what the codes stand for."""
        return decoded(self.kv, self.shape.head_dim)


@pytest.mark.parametrize("code", CODES, ids=str)
@pytest.mark.parametrize(
    "heads",
    [Heads(4, 2, 64, late=True), Heads(3, 1, 12, norms=True), Heads(2, 1, 96)],
    ids=str,
)
def test_what_is_stored_is_what_a_twin_encodes(
    device: torch.device, code: torch.dtype, heads: Heads
) -> None:
    coded = Coded(device, code, heads)
    pool, shape = coded.pool, coded.shape
    rows = pool.projected(7)
    norms = [pool.random(heads.dim) if heads.norms else None for _ in range(2)]
    slots = pool.ints(3, 17, 0, -1, 44, 21, 90)
    positions = pool.ints(5, 9, 0, 1, 2, 3, 4)
    found = Projected(rows.qkv.clone(), rows.source, rows.bias)
    before = coded.kv.clone()
    rotate_and_store(rows, pool.cos_sin, positions, slots, pool.kv[:, 1], shape, *norms)
    rotate_and_store(found, pool.cos_sin, positions, slots, coded.kv[:, 1], shape, *norms)
    page, place = slots.long() // PAGE, slots.long() % PAGE
    stored = slots >= 0
    for part in range(2):
        wanted = encoded(pool.kv[:, 1, part][page, place], code)
        there = coded.kv[:, 1, part][page, place].view(torch.uint8)
        assert torch.equal(there[stored], wanted[stored])
    queries = heads.heads * heads.dim
    assert torch.equal(found.qkv[:, :queries], rows.qkv[:, :queries])
    made = rows.qkv[:, queries:].view(7, 2 * heads.kv_heads, heads.dim)
    wanted = decoded(encoded(made, code).view(code), heads.dim)
    assert torch.equal(found.qkv[:, queries:], wanted.flatten(1))
    others = [layer for layer in range(LAYERS) if layer != 1]
    same = coded.kv.view(torch.uint8) == before.view(torch.uint8)
    assert same[:, others].all(), "another layer was written"
    assert int((~same).any(dim=-1).sum()) <= 6 * 2 * heads.kv_heads


@pytest.mark.parametrize("code", CODES, ids=str)
def test_gathered_tokens_are_decoded(device: torch.device, code: torch.dtype) -> None:
    coded = Coded(device, code, Heads(4, 2, 64))
    wide = torch.zeros(2, 40, 3, 64, device=device)
    keys, values = wide[0, :, 1:], wide[1, :, :2]  # rows with others between them
    keys, values = keys.contiguous(), values.contiguous()
    gather_tokens(coded.kv[:, 1], coded.pool.table[0], 38, keys, values)
    pages = coded.pool.table[0].long()
    wanted = coded.numbers[pages, 1].transpose(0, 1).flatten(1, 2)
    assert torch.equal(keys[:38], wanted[0, :38])
    assert torch.equal(values[:38], wanted[1, :38])
    assert not keys[38:].any()


@pytest.mark.parametrize("code", CODES, ids=str)
@pytest.mark.parametrize(
    "heads",
    [
        Heads(4, 2, 64),
        Heads(3, 1, 12, window=40),
        Heads(4, 1, 32, sinks=True),
        Heads(2, 1, 96),
        Heads(2, 1, 128),
    ],
    ids=str,
)
def test_attention_over_codes_is_that_over_what_they_stand_for(
    device: torch.device, code: torch.dtype, heads: Heads
) -> None:
    coded = Coded(device, code, heads)
    pool, shape = coded.pool, coded.shape
    workspace = SplitWorkspace.make(2, 150, heads.heads, heads.kv_heads, heads.dim, device)
    rows, positions = pool.ints(0, 1), pool.ints(149, 8)
    new, found = pool.projected(2), pool.blank(2)
    place = (pool.cos_sin, rows, positions, pool.table)
    decode_attention(new, *place, coded.kv[:, 1], shape, workspace, found)
    numbers, wanted = coded.numbers, pool.blank(2)
    # The new tokens are in the pages now; a chunk of one token each reads them there.
    turned = Projected(new.qkv.clone())
    nowhere = pool.ints(-1, -1)
    rotate_and_store(turned, pool.cos_sin, positions, nowhere, numbers[:, 1], shape)
    blocks = pool.ints((0, 149, 1, 0), (1, 8, 1, 1))
    attend_anywhere(turned.qkv, blocks, pool.table, numbers[:, 1], shape, wanted)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    again = pool.blank(2)
    attend_anywhere(turned.qkv, blocks, pool.table, coded.kv[:, 1], shape, again)
    if code != torch.uint8:
        assert torch.equal(again, wanted)
    # Halves of a head are two products.
    torch.testing.assert_close(again, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize("kv_dtype", ["int8", "int4"])
@pytest.mark.parametrize("name", ["llama-biases", "qwen3"])
def test_a_gpu_with_pages_of_codes_answers_as_a_cpu_does(
    device: torch.device, tmp_path: Path, name: str, kv_dtype: KvDtype
) -> None:
    save(TINY_MODELS[name].changed(num_hidden_layers=2), tmp_path)
    shape = read_architecture(tmp_path)
    model = load_model(Checkpoint(tmp_path), shape, torch.float32, "cpu", balanced=True)
    size = stored_shape(shape.pages_shape(PAGES, PAGE_SIZE), kv_dtype, "cpu")
    kv = torch.zeros(size, dtype=stored_dtype(kv_dtype, torch.float32))
    source = random.Random(3)
    prompts = [[source.randrange(VOCABULARY) for _ in range(length)] for length in (11, 2)]
    samplings = [Sampling(), Sampling(temperature=0.9, seed=5)]
    wanted = answers(Runner(model, kv), prompts, samplings, 5)
    runner = gpu_runner(tmp_path, str(device), PAGES, PAGE_SIZE, kv_dtype=kv_dtype)
    assert answers(runner, prompts, samplings, 5) == wanted
