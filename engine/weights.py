"""Fills the model's fused buffers, from a checkpoint or with random numbers.

If several ranks run the model, each keeps only its own part (architecture.Split).
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from baton.engine.architecture import Architecture, Split
from baton.engine.checkpoint import Arrange, Checkpoint, Cut
from baton.engine.expert_weights import ExpertLoader
from baton.engine.key_balance import balance_keys
from baton.engine.latent_config import NORM_EPSILON
from baton.engine.model import Layer, Model
from baton.engine.model_choice import WeightQuantization
from baton.engine.random_tensors import RandomTensors
from baton.engine.rotations import interleave_pairs
from baton.engine.tensor_parallel import Group, SummedLinear, SummedNorms
from baton.engine.weight_codes import CodedWeights, join_grids, multiplies_exact_codes, packs
from baton.engine.weight_reader import WeightReader
from baton.kernels.attention import Scoring
from baton.kernels.exact_codes import FineGrid
from baton.kernels.experts import MLP
from baton.kernels.latent import LatentHeads
from baton.kernels.linear import AnyGrid, GatedLinear, HeadLinear, Linear, RMSNorm

Projections = tuple[Linear, LatentHeads | None, RMSNorm | None, RMSNorm | None]
"""A layer's qkv and what is between it and attention: latents, norms of queries and keys."""

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


def load_model(
    source: Checkpoint | RandomTensors,
    architecture: Architecture,
    dtype: torch.dtype,
    device: str,
    group: Group | None = None,
    quantization: WeightQuantization = "none",
    *,
    balanced: bool = False,
    packed: bool | None = None,
) -> Model:
    """Loads the source's weights; with a group, this rank's part of them. Each layer is quantized
    before the next is loaded. `balanced`: keys are balanced for int8 pages. `packed`: integers are
    packed for GPUs; by default the device decides.

    `architecture` is the whole model's; the returned model has that of its part.
    """
    codes = CodedWeights(
        quantization,
        packed=packs(device, dtype) if packed is None else packed,
        exact=packed is None and multiplies_exact_codes(device, dtype),
    )
    return _Loader(source, architecture, dtype, device, group, codes).load(balanced)


class _Loader:
    def __init__(
        self,
        source: Checkpoint | RandomTensors,
        architecture: Architecture,
        dtype: torch.dtype,
        device: str,
        group: Group | None,
        codes: CodedWeights,
    ) -> None:
        self._source = source
        self._codes = codes
        self._group = group
        self._split = group.split if group else Split()
        self._architecture = self._split.of(architecture)
        self._reader = WeightReader(source, self._architecture, self._split, dtype, device)
        self._experts = ExpertLoader(self._reader, group)

    def load(self, balanced: bool) -> Model:
        shape = self._architecture
        embedding, grid = self._embedding()
        layers = []
        for index in range(shape.layers):
            layer = self._layer(index)
            layers.append(balance_keys(layer, shape) if balanced else layer)
            self._codes.finish_layer(layers[-1])
        norm = self._reader.norm("model.norm.weight", shape.hidden)
        head = self._codes.finish_head(self._head(embedding, grid))
        self._source.finish(shape.prefixes_not_run)
        self._codes.report(layers)
        scale = shape.embedding_scale
        if shape.embedding_root:
            scale = float(torch.tensor(scale, dtype=self._reader.dtype))
        return Model(shape, embedding, scale, layers, norm, head)

    def _embedding(self) -> tuple[Tensor, FineGrid | None]:
        """A tied matrix may be stored under either name."""
        shape, source = self._architecture, self._source
        other = shape.tied_embeddings and EMBEDDING not in source and HEAD in source
        return self._whole(HEAD if other else EMBEDDING)

    def _whole(self, name: str) -> tuple[Tensor, FineGrid | None]:
        """A matrix with a row for each token, and the grid of its codes in float32."""
        rows, hidden = self._architecture.vocabulary_size, self._architecture.hidden
        grid = self._codes.exact_grid(self._source, name, Cut(0, rows, ((0, rows),)))
        return self._reader.tensor(name, rows, hidden), grid

    def _head(self, embedding: Tensor, grid: FineGrid | None) -> Linear:
        """The head, without rows on ranks that do not sample.

        If the config calls the head tied but the checkpoint stores a different one, it is not
        tied, as in transformers.
        """
        tied = self._architecture.tied_embeddings
        if self._split.rank:
            self._source.skip(HEAD)
            return Linear(embedding[:0])
        if tied and HEAD not in self._source:
            head = embedding
        else:
            head, grid = self._whole(HEAD)
        linear = Linear(embedding if tied and torch.equal(head, embedding) else head)
        self._codes.add(linear, grid)
        return linear

    def _layer(self, index: int) -> Layer:
        shape = self._architecture
        prefix = f"model.layers.{index}."
        attention = prefix + "self_attn."
        place = shape.rope_of_layer[index]
        projections = self._latent if shape.latent else self._by_heads
        qkv, latent, query_norm, key_norm = projections(attention, place)
        summed_norms = self._summed_norms(query_norm, key_norm)
        values = shape.heads * (shape.latent.value if shape.latent else shape.head_dim)
        norms = {
            field: self._reader.norm(f"{prefix}{name}.weight", shape.hidden) if name else None
            for field, name in shape.norms._asdict().items()
        }
        return Layer(
            attention_norm=norms["attention"],
            qkv=qkv,
            latent=latent,
            query_norm=None if summed_norms else query_norm,
            key_norm=None if summed_norms else key_norm,
            summed_norms=summed_norms,
            scoring=Scoring(shape.score_scale, shape.score_cap),
            sinks=self._sinks(attention + "sinks") if shape.sinks else None,
            output=self._summed(attention + "o_proj", values, bias=shape.output_bias),
            attention_after=norms["attention_after"],
            mlp_norm=norms["mlp"],
            mlp=self._experts.load(prefix) if shape.sparse[index] else self._mlp(prefix + "mlp."),
            mlp_after=norms["mlp_after"],
            window=shape.windows[index],
            rope=place,
        )

    def _mlp(self, prefix: str) -> MLP:
        shape = self._architecture
        size, bias = shape.intermediate, shape.mlp_bias
        fused = "gate_up_proj" if shape.fused else None
        sizes = {"gate_proj": size, "up_proj": size}
        weight, biases, grid = self._joined(prefix, sizes, fused, bias=bias)
        gate_up = GatedLinear(weight, biases, shape.activation)
        self._codes.add(gate_up, grid)
        return MLP(gate_up, self._summed(prefix + "down_proj", size, bias=bias))

    def _by_heads(self, prefix: str, place: int | None) -> Projections:
        shape = self._architecture
        query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        turned = shape.head_dim if place is None else shape.ropes[place].dim
        paired = partial(interleave_pairs, head_dim=shape.head_dim, dim=turned)
        sizes = {"q_proj": query, "k_proj": key, "v_proj": key}
        fused = "qkv_proj" if shape.fused else None
        weight, bias, grid = self._joined(prefix, sizes, fused, bias=shape.qkv_bias)
        for joined in (weight, bias, *(grid[:2] if grid else ())):
            if joined is not None:
                joined[: query + key] = paired(joined[: query + key])
        qkv = Linear(weight, bias)
        self._codes.add(qkv, grid)
        query_norm = self._query_key_norm(f"{prefix}q_norm.weight", query, paired)
        key_norm = self._query_key_norm(f"{prefix}k_norm.weight", key, paired)
        return qkv, None, query_norm, key_norm

    def _latent(self, prefix: str, _: int | None) -> Projections:
        """One product for queries (or compressed queries) and latents; and what follows it."""
        heads, latent = self._architecture.heads, self._architecture.latent
        assert latent is not None
        queries = heads * (latent.plain + latent.rotated)
        size, query, norm = queries, None, None
        if latent.query_rank:
            size = latent.query_rank
            norm = self._latent_norm(f"{prefix}q_a_layernorm.weight", size)
            query = Linear(
                self._queries(f"{prefix}q_b_proj.weight", self._reader.empty(queries, size))
            )
        weight = self._reader.empty(size + latent.rank + latent.rotated, self._architecture.hidden)
        if query:
            self._source.copy(f"{prefix}q_a_proj.weight", weight[:size])
        else:
            self._queries(f"{prefix}q_proj.weight", weight[:size])
        self._source.copy(f"{prefix}kv_a_proj_with_mqa.weight", weight[size:])
        self._join_pairs(weight[-latent.rotated :])
        both = self._reader.empty(heads * (latent.plain + latent.value), latent.rank)
        self._source.copy(f"{prefix}kv_b_proj.weight", both, cut=self._reader.cut(0, len(both)))
        both = both.view(heads, -1, latent.rank)
        absorb = HeadLinear(both[:, : latent.plain].transpose(1, 2).contiguous())
        expand = HeadLinear(both[:, latent.plain :].contiguous())
        shape = Linear(torch.empty_like(both.flatten(0, 1), device="meta"))
        products = LatentHeads(query, norm, absorb, expand, shape, latent.rotated)
        key_norm = self._latent_norm(f"{prefix}kv_a_layernorm.weight", latent.rank)
        return Linear(weight), products, None, key_norm

    def _queries(self, name: str, weight: Tensor) -> Tensor:
        """weight [heads * (plain + rotated), inputs]"""
        latent = self._architecture.latent
        assert latent is not None
        self._source.copy(name, weight, cut=self._reader.cut(0, len(weight)))
        for head in weight.view(-1, latent.plain + latent.rotated, weight.shape[1]):
            self._join_pairs(head[latent.plain :])
        return weight

    def _join_pairs(self, rows: Tensor) -> None:
        """rows [rotated, inputs]"""
        if not self._architecture.neighbours:
            rows.copy_(interleave_pairs(rows.clone(), len(rows), len(rows)))

    def _latent_norm(self, name: str, size: int) -> RMSNorm:
        return RMSNorm(self._reader.tensor(name, size), NORM_EPSILON)

    def _joined(
        self, prefix: str, sizes: dict[str, int], fused: str | None, *, bias: bool
    ) -> tuple[Tensor, Tensor | None, AnyGrid | None]:
        """Joins the weights, biases and codes of projections of the residual, {name: outputs}. In
        the checkpoint they are `fused` or separate."""
        rows = sum(sizes.values())
        weight = self._reader.empty(rows, self._architecture.hidden)
        biases = self._reader.empty(rows) if bias else None
        start, grids = 0, []
        parts = {fused: tuple(sizes.values())} if fused else {n: (s,) for n, s in sizes.items()}
        for name, some in parts.items():
            mine, cut = slice(start, start + sum(some)), self._reader.cut(0, *some)
            grids.append(self._grid(f"{prefix}{name}.weight", cut))
            self._source.copy(f"{prefix}{name}.weight", weight[mine], cut=cut)
            if biases is not None:
                self._source.copy(f"{prefix}{name}.bias", biases[mine], cut=cut)
            start += sum(some)
        return weight, biases, join_grids(grids)

    def _summed(self, name: str, inputs: int, *, bias: bool) -> Linear:
        """A projection onto the residual, split by inputs over the ranks."""
        weight, biases = self._reader.empty(self._architecture.hidden, inputs), None
        cut = self._reader.cut(1, inputs)
        grid = self._grid(f"{name}.weight", cut)
        self._source.copy(f"{name}.weight", weight, cut=cut)
        if bias and self._split.rank:
            self._source.skip(f"{name}.bias")
        elif bias:
            biases = self._reader.tensor(f"{name}.bias", self._architecture.hidden)
        group = self._group
        linear = SummedLinear(weight, biases, group) if group else Linear(weight, biases)
        self._codes.add(linear, grid)
        return linear

    def _grid(self, name: str, cut: Cut) -> AnyGrid | None:
        found = self._codes.grid(self._source, name, cut)
        return found and found.to(self._reader.device)

    def _sinks(self, name: str) -> Tensor:
        sinks = torch.empty(self._architecture.heads, device=self._reader.device)
        self._source.copy(name, sinks, cut=self._reader.cut(0, len(sinks)))
        return sinks

    def _query_key_norm(self, name: str, outputs: int, paired: Arrange) -> RMSNorm | None:
        kind = self._architecture.query_key_norm
        if kind == "none":
            return None
        if kind == "head":
            return self._reader.norm(name, self._architecture.head_dim, paired)
        return self._reader.norm(name, outputs, paired, self._reader.cut(0, outputs))

    def _summed_norms(self, query: RMSNorm | None, key: RMSNorm | None) -> SummedNorms | None:
        together = self._architecture.query_key_norm == "projection"
        if together and query and key and self._group:
            return SummedNorms(query, key, self._group)
        return None
