"""The decoder on a GPU: the layers over a batch of rows.

Few rows cost as much as reading the weights: products include the norms, the gate and the sums
(kernels/gpu/linear.py), five kernels per layer. Many rows use the matrix library's products, with
one kernel between two of them. Both give a row the same bits if the library does not split the
inputs of a product (`Numerics`). If several ranks share the model, their parts are summed before
they are added to the residual, in either form. Experts have one form for any number of rows
(kernels/gpu/experts.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from baton.engine.gpu.adapter_rows import StepAdapters
from baton.engine.gpu.numerics import Numerics
from baton.engine.model import Layer, Model
from baton.engine.tensor_parallel import SummedExperts, SummedLinear
from baton.kernels.experts import MLP, Experts
from baton.kernels.fp8 import Fp8Weight
from baton.kernels.gpu.adapted_gate import expand_and_gate
from baton.kernels.gpu.experts import gated as experts_gated
from baton.kernels.gpu.experts import sum_parts, weighted
from baton.kernels.gpu.experts_of_row import weighted_onto
from baton.kernels.gpu.fp8_rows import (
    Fp8Rows,
    Fp8Scales,
    library_multiplies,
    library_product,
    library_sums,
)
from baton.kernels.gpu.gate import gate_and_multiply, gate_to_codes
from baton.kernels.gpu.latent_projection import norm_queries
from baton.kernels.gpu.linear import few_rows, few_rows_alone, few_rows_onto
from baton.kernels.gpu.low_rank import TILE_ROWS, expand_onto
from baton.kernels.gpu.norm import Scaled, embed, rms_norm, scale_rows
from baton.kernels.gpu.packed_tiles import decoded
from baton.kernels.gpu.prefetch import SHORT_BYTES
from baton.kernels.gpu.rotary import Projected, norm_projections
from baton.kernels.gpu.routing import route
from baton.kernels.gpu.shrink import shrink
from baton.kernels.gpu.tilings import (
    MOST_GATED_ROWS,
    MOST_ROWS,
    Weight,
    is_faster_without_scales,
    is_wide,
    most_rows,
)
from baton.kernels.latent import LatentHeads
from baton.kernels.linear import AnyLinear, Linear, RMSNorm
from baton.kernels.packed import PackedWeight

SPLIT_ROWS = range(65, 257)
"""With this many rows a product onto the residual has tiles for only half of the chip. If a row's
bits may depend on the batch, it is split into two products over half of the inputs each, which
the next norm adds up."""

Attend = Callable[[int, Projected], Tensor]
"""(layer, queries, keys and values of T rows) -> [T, heads * dim]. Also stores the rows' keys
and values."""


class Forward:
    """The layers of a model, in one of the numerics."""

    def __init__(self, model: Model, numerics: Numerics) -> None:
        self._model = model
        self._epsilon = model.architecture.norm_epsilon
        self._norms_projections = model.architecture.query_key_norm == "projection"
        self._numerics = numerics
        self._indices = list(range(len(model.layers)))
        self._most_rows, self._most_plain_rows = most_rows(layer_weights(model))
        # In float16 rows are normed before the product: see kernels/gpu/norm.py.
        self._late_size = model.embedding.dtype != torch.float16

    def with_few_layers(self) -> Forward:
        """A forward of few layers that uses all kernels: the first and the last layer, which have
        their own, and one layer for each pair of kinds of neighbours, since what a layer reads
        depends on the one before."""
        kinds = [(layer.window, layer.rope, type(layer.mlp)) for layer in self._model.layers]
        pairs = {(kinds[at - 1], kinds[at]): at for at in self._indices[:0:-1]}
        before = {at - 1 for at in pairs.values()}
        few = Forward(self._model, self._numerics)
        few._indices = sorted({0, *before, *pairs.values(), len(kinds) - 1})
        return few

    def __call__(
        self,
        tokens: Tensor,
        attend: Attend,
        samples: Tensor | None = None,
        adapters: StepAdapters | None = None,
    ) -> Tensor:
        """tokens [T] -> the head's input, [n, hidden], for rows `samples` [n] or for all.

        With `samples`, the last layer's `attend` returns only those rows.
        """
        with self._numerics.library(len(tokens)):
            return self._layers(tokens, attend, samples, adapters)

    def _layers(
        self,
        tokens: Tensor,
        attend: Attend,
        samples: Tensor | None,
        adapters: StepAdapters | None,
    ) -> Tensor:
        model = self._model
        if adapters:
            adapters.begin()
        first = _weight(model.layers[0].attention_norm)
        residual, source = embed(
            tokens, model.embedding, first, self._epsilon, model.embedding_scale
        )
        last = len(model.layers) - 1
        for index in self._indices:
            layer = model.layers[index]
            attended = attend(index, self._project(layer, source, adapters))
            if index == last and samples is not None:
                residual = residual[samples]
                adapters = adapters and adapters.of_samples()
            norms = _weight(layer.mlp_norm), _weight(layer.attention_after)
            inner = layer.mlp.gate_up if isinstance(layer.mlp, MLP) else None
            source = self._onto(residual, layer.output, attended, *norms, adapters, inner)
            following: RMSNorm | None = model.norm
            product = model.head
            if index < last:
                following = model.layers[index + 1].attention_norm
                product = model.layers[index + 1].qkv
            norms = _weight(following), _weight(layer.mlp_after)
            source = self._feed_forward(residual, layer.mlp, source, *norms, product, adapters)
        return rms_norm(residual, model.norm.weight, self._epsilon)

    def logits(self, normed: Tensor, out: Tensor | None = None) -> Tensor:
        """The head's input [n, hidden] -> [n, vocabulary]; [n, 0] on ranks without a head."""
        weight = self._model.head.weight
        if not len(weight):
            return normed[:, :0]
        with self._numerics.library(len(normed)):
            few = len(normed) <= MOST_ROWS
            return self._model.finish_logits(self._product(weight, normed, out, few=few))

    def _is_few(
        self,
        x: Tensor,
        weight: Weight,
        adapters: StepAdapters | None = None,
        *,
        gates: bool = False,
    ) -> bool:
        """True if the product of these rows includes what follows it. With adapters, the rows must
        fit into one tile."""
        if isinstance(weight, Tensor):
            most = self._most_plain_rows
            if gates and is_wide(len(weight) // 2):
                most = max(most, MOST_GATED_ROWS)
        else:
            most = self._most_rows
        return len(x) <= most and (adapters is None or len(x) <= TILE_ROWS)

    def _reads_codes(self, rows: Tensor, linear: AnyLinear, adapters: StepAdapters | None) -> bool:
        """True if the product of these rows reads codes, and nothing else reads the rows."""
        weight = linear.kept
        return isinstance(weight, Fp8Weight) and not adapters and not self._is_few(rows, weight)

    def _product(
        self,
        weight: Weight,
        x: Tensor | Fp8Rows,
        out: Tensor | None = None,
        *,
        few: bool | None = None,
    ) -> Tensor:
        if isinstance(x, Fp8Rows):
            assert isinstance(weight, Fp8Weight)
            return library_product(x, weight, self._model.embedding.dtype)
        if self._is_few(x, weight) if few is None else few:
            return few_rows_alone(x, weight, out)
        if isinstance(weight, Fp8Weight):
            return library_product(x, weight, x.dtype)
        if isinstance(weight, PackedWeight):
            weight = decoded(weight)
        return torch.mm(x, weight.t(), out=out)

    def _adapted(
        self, linear: AnyLinear, x: Tensor | Fp8Rows, adapters: StepAdapters | None
    ) -> Tensor:
        """The product without its bias, with what adapters add to it."""
        product = self._product(linear.kept, x)
        if isinstance(x, Tensor) and (added := adapters and adapters.of_product(linear)):
            expand_onto(product, shrink(x, added))
        return product

    def _project(self, layer: Layer, source: Scaled, adapters: StepAdapters | None) -> Projected:
        linear = layer.qkv
        if self._is_few(source.x, linear.kept, adapters) and self._late_size:
            output = _read(layer.output)
            ahead = output if output.nbytes <= SHORT_BYTES else None
            added = adapters and adapters.of_product(linear)
            projected = Projected(
                few_rows(source, linear.kept, linear.bias, ahead=ahead, adapters=added)
            )
        else:
            projected = Projected(self._adapted(linear, source.read, adapters), source, linear.bias)
        if layer.latent:
            return self._for_latents(projected, layer.latent, adapters)
        if layer.summed_norms:
            shared = layer.summed_norms
            norms, group = (shared.query.weight, shared.key.weight), shared.group
            return norm_projections(projected, *norms, self._epsilon, group.split.size, group.sum)
        if self._norms_projections and layer.query_norm and layer.key_norm:
            norms = layer.query_norm.weight, layer.key_norm.weight
            return norm_projections(projected, *norms, self._epsilon)
        return projected

    def _for_latents(
        self, projected: Projected, latent: LatentHeads, adapters: StepAdapters | None
    ) -> Projected:
        """Adds queries made from compressed ones, and adapters of products between latents and
        heads."""
        queries, norm = None, latent.query_norm
        if latent.query and norm:
            normed = norm_queries(projected, norm.weight, norm.epsilon)
            queries = self._adapted(latent.query, normed, adapters)
        between = adapters and adapters.between(latent.both)
        return replace(projected, queries=queries, adapters=between)

    def _feed_forward(
        self,
        residual: Tensor,
        mlp: MLP | Experts,
        source: Scaled,
        norm: Tensor | None,
        after: Tensor | None,
        following: Linear,
        adapters: StepAdapters | None,
    ) -> Scaled:
        """residual += mlp(source); returns the same as _onto."""
        if isinstance(mlp, MLP):
            gated = self._gated(mlp, source, adapters)
            return self._onto(residual, mlp.down, gated, norm, after, adapters, following)
        routed = route(source, mlp.router, mlp.correction, mlp.routing)
        gated = experts_gated(source, routed, mlp.gate_up, mlp.activation, mlp.biases.gate_up)
        alone = not isinstance(mlp, SummedExperts) and len(residual) == 1
        if alone and norm is not None and after is None and self._late_size:
            down, bias, ahead = mlp.down, mlp.biases.down, _read(following)
            return weighted_onto(gated, routed, down, bias, residual, norm, self._epsilon, ahead)
        parts = weighted(gated, routed, mlp.down, mlp.biases.down)
        if isinstance(mlp, SummedExperts):
            parts = mlp.group.sum(sum_parts(parts))[None]
        elif after is not None:  # The norm is of their sum.
            parts = sum_parts(parts)[None]
        return scale_rows(residual, norm, self._epsilon, parts, after)

    def _gated(self, mlp: MLP, source: Scaled, adapters: StepAdapters | None) -> Tensor | Fp8Rows:
        linear = mlp.gate_up
        added = adapters and adapters.of_product(linear)
        if self._is_few(source.x, linear.kept, adapters, gates=True):
            return few_rows(source, linear.kept, linear.bias, linear.activation, adapters=added)
        product = self._product(linear.kept, source.read)
        if added:
            shrunk = shrink(source.x, added)
            return expand_and_gate(product, shrunk, source, linear.bias, linear.activation)
        codes = self._reads_codes(source.x, mlp.down, adapters)
        made = gate_to_codes if codes else gate_and_multiply
        return made(product, source, linear.bias, linear.activation)

    def _onto(
        self,
        residual: Tensor,
        linear: Linear,
        x: Tensor | Fp8Rows,
        norm: Tensor | None,
        after: Tensor | None = None,
        adapters: StepAdapters | None = None,
        following: AnyLinear | None = None,
    ) -> Scaled:
        """residual += linear(x), normed by `after` if given. Returns the residual scaled for its
        norm, if any, and for the product that follows."""
        plain = after is None and not isinstance(linear, SummedLinear)
        if plain and norm is not None and isinstance(x, Tensor):
            found = self._fused_onto(residual, linear, x, norm, adapters)
            if found:
                return found
        scales = None
        if plain and isinstance(linear.kept, Fp8Weight):
            part, scales = self._sums(linear, linear.kept, x, adapters)
        else:
            part = self._adapted(linear, x, adapters)
        if linear.bias is not None:
            part += linear.bias
        if isinstance(linear, SummedLinear):
            part = linear.group.sum(part)
        codes = following is not None and self._reads_codes(residual, following, adapters)
        return scale_rows(
            residual, norm, self._epsilon, part[None], after, part_scales=scales, codes=codes
        )

    def _sums(
        self,
        linear: Linear,
        weight: Fp8Weight,
        x: Tensor | Fp8Rows,
        adapters: StepAdapters | None,
    ) -> tuple[Tensor, Fp8Scales | None]:
        """A product without its bias, with what adapters add to it, and scales still to be applied.
        Scales come before anything that is added: with adapters or a bias they are applied here."""
        added = adapters.of_product(linear) if adapters and isinstance(x, Tensor) else None
        if library_multiplies(weight):
            sums = library_sums(x, weight, self._model.embedding.dtype)
            if added is None and linear.bias is None:
                return sums
            product = sums.scaled()
        else:
            assert isinstance(x, Tensor)
            product = few_rows_alone(x, weight, onto=True)
        if added:
            assert isinstance(x, Tensor)
            expand_onto(product, shrink(x, added))
        return product, None

    def _fused_onto(
        self,
        residual: Tensor,
        linear: Linear,
        x: Tensor,
        norm: Tensor,
        adapters: StepAdapters | None,
    ) -> Scaled | None:
        """A faster form of _onto for linear layers that are not summed, if it gives the same bits
        or others are accepted."""
        weight, bias = linear.kept, linear.bias
        if self._is_few(x, weight, adapters) and not is_faster_without_scales(len(x), weight):
            added = adapters and adapters.of_product(linear)
            scaled = few_rows_onto(x, weight, residual, norm, self._epsilon, bias, added)
            return scaled if self._late_size else scale_rows(residual, norm, self._epsilon)
        if self._numerics is Numerics.FAST and not adapters and _is_split(linear, x):
            parts = torch.bmm(_halves(x).transpose(0, 1), _halves(linear.weight).permute(1, 2, 0))
            return scale_rows(residual, norm, self._epsilon, parts)
        return None


def layer_weights(model: Model) -> Iterator[Weight]:
    """The weights of products, without those of experts and between latents and heads."""
    for layer in model.layers:
        mlp = (layer.mlp.gate_up, layer.mlp.down) if isinstance(layer.mlp, MLP) else ()
        yield from (linear.kept for linear in (layer.qkv, layer.output, *mlp))


def uses_fp8(model: Model) -> bool:
    return any(isinstance(weight, Fp8Weight) for weight in layer_weights(model))


def _weight(norm: RMSNorm | None) -> Tensor | None:
    return norm.weight if norm else None


def _read(linear: Linear) -> Tensor:
    """The tensor that a product with `linear` reads."""
    kept = linear.kept
    if isinstance(kept, PackedWeight):
        return kept.words
    return kept.codes if isinstance(kept, Fp8Weight) else kept


def _is_split(linear: Linear, x: Tensor) -> bool:
    rows, size = x.shape
    whole = linear.bias is None and not isinstance(linear, SummedLinear)
    whole = whole and isinstance(linear.kept, Tensor)
    return x.dtype is torch.bfloat16 and whole and size % 128 == 0 and rows in SPLIT_ROWS


def _halves(matrix: Tensor) -> Tensor:
    """[rows, size] -> [rows, 2, size / 2]."""
    return matrix.view(len(matrix), 2, -1)
