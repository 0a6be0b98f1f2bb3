"""Floors: the least time that the hardware needs for a model's steps."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
from torch import Tensor

from baton.engine.model import Model
from baton.kernels.experts import MLP, Experts
from baton.kernels.fp8 import FP8
from baton.kernels.linear import GatedLinear, Linear
from baton.kernels.packed import PackedWeight

PAGE_SIZE = 16
CHUNK = 8192
MAX_BATCH = 256
READ_ROWS = 256
"""Up to this many rows, a product's floor is the time to read its packed weights."""


class Floors:
    """The least time the hardware needs, measured part by part."""

    def __init__(self, model: Model, kv: Tensor) -> None:
        self._model = model
        self._token_bytes = kv[0, 0].nbytes // PAGE_SIZE  # in one layer
        self._shape = model.architecture
        self._read_rate = _read_rate()
        self._linears: dict[int, float] = {}
        self._attended: dict[int, float] = {}

    def prompt(self, length: int) -> float:
        """All products of a prompt and its causal attention, in ms."""
        pieces = [CHUNK] * (length // CHUNK) + ([length % CHUNK] if length % CHUNK else [])
        return sum(self._products(piece) for piece in pieces) + self._attention(length)

    def step(self, batch: int, context: int) -> float:
        """All products of a decode step and one read of its keys and values, in ms."""
        shape = self._shape
        tokens = batch * sum(min(context, window or context) for window in shape.windows)
        return self._products(batch) + tokens * self._token_bytes / self._read_rate * 1e3

    def _products(self, rows: int) -> float:
        if rows not in self._linears:
            self._linears[rows] = graph_ms(lambda: self._run_products(rows))
        return self._linears[rows]

    def _run_products(self, rows: int) -> None:
        for layer in self._model.layers:
            for linear in (layer.qkv, layer.latent and layer.latent.query, layer.output):
                if linear:
                    _product(linear, rows)
            if layer.latent:
                _batched(layer.latent.absorb.weight, rows)
                _batched(layer.latent.expand.weight, rows)
            _feed_forward(layer.mlp, rows)
        _product(self._model.head, rows if rows <= MAX_BATCH else 1)

    def _attention(self, length: int) -> float:
        if length not in self._attended:
            self._attended[length] = self._measure_attention(length)
        return self._attended[length]

    def _measure_attention(self, length: int) -> float:
        shape = self._shape
        heads, kv_heads, dim, share = shape.heads, shape.kv_heads, shape.head_dim, 1.0
        if latent := shape.latent:
            # As if keys and values were expanded; cuDNN does not support heads of these sizes.
            kv_heads, dim = heads, 128
            share = (latent.plain + latent.rotated + latent.value) / (2 * dim)
        query = torch.randn(1, heads, length, dim, dtype=torch.bfloat16, device="cuda")
        keys = query[:, :kv_heads].clone()

        def attend() -> None:
            torch.ops.aten._scaled_dot_product_cudnn_attention(
                query, keys, keys, None, True, 0.0, True, False
            )

        # A window counts by the share of query-key pairs that it leaves.
        layers = sum(min(1.0, 2 * (window or length) / length) for window in shape.windows)
        return layers * share * graph_ms(attend)


_inputs: dict[tuple[int, int], Tensor] = {}
_inputs_in_fp8: dict[tuple[int, int], Tensor] = {}
_decoded: dict[torch.Size, Tensor] = {}


def _product(linear: Linear | GatedLinear, rows: int) -> None:
    weight = linear.kept
    size = (rows, weight.shape[1])
    if size not in _inputs:
        _inputs[size] = torch.randn(size, dtype=torch.bfloat16, device="cuda")
    if isinstance(weight, PackedWeight):
        if rows <= READ_ROWS:
            weight.words.view(torch.float32).sum()
            return
        weight = _scratch(weight.shape)
    if isinstance(weight, Tensor):
        torch.mm(_inputs[size], weight.t())
    else:  # with a single scale, which is fastest in the library
        codes, one = _codes(size), weight.scales[0]
        torch._scaled_mm(
            codes, weight.codes.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True
        )


def _scratch(shape: torch.Size) -> Tensor:
    if shape not in _decoded:
        _decoded[shape] = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
    return _decoded[shape]


def _feed_forward(mlp: MLP | Experts, rows: int) -> None:
    """Runs an MLP, or the experts that evenly spread rows choose, with equally many rows each."""
    if isinstance(mlp, MLP):
        _product(mlp.gate_up, rows)
        _product(mlp.down, rows)
        return
    routing = mlp.routing
    chosen = routing.experts * (1.0 - (1.0 - routing.top_k / routing.experts) ** rows)
    used = max(routing.top_k, round(chosen))
    _product(mlp.router, rows)
    for weight in (mlp.gate_up, mlp.down):
        _batched(weight[:used], -(-rows * routing.top_k // used))
        _batched(weight[routing.experts :], rows)


def _codes(size: tuple[int, int]) -> Tensor:
    if size not in _inputs_in_fp8:
        _inputs_in_fp8[size] = _inputs[size].to(FP8)
    return _inputs_in_fp8[size]


_batches: dict[tuple[int, int, int], Tensor] = {}


def _batched(weight: Tensor, rows: int) -> None:
    """weight [experts, N, K], each with `rows` rows."""
    size = (len(weight), rows, weight.shape[2])
    if size not in _batches:
        _batches[size] = torch.randn(size, dtype=torch.bfloat16, device="cuda")
    if len(weight):
        torch.bmm(_batches[size], weight.transpose(1, 2))


def graph_ms(body: Callable[[], object], repeats: int = 5) -> float:
    body()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    return statistics.median(event_ms(graph.replay) for _ in range(repeats))


def event_ms(run: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def _read_rate() -> float:
    """The memory's highest read rate, in bytes per second."""
    values = torch.empty(1 << 30, dtype=torch.float32, device="cuda").normal_()
    values.sum()
    return values.nbytes / min(event_ms(lambda: values.sum()) for _ in range(8)) * 1e3
