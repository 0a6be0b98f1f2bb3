"""Loads a checkpoint's tensors straight into the model's fused buffers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from engine.architecture import Architecture
from engine.checkpoint import Checkpoint
from engine.model import Layer, Model
from engine.rope import interleave_pairs
from kernels.linear import GatedLinear, Linear
from kernels.norm import RMSNorm


def load_model(
    folder: Path,
    architecture: Architecture,
    dtype: torch.dtype,
    device: str,
    progress: Callable[[float], None] | None = None,
) -> Model:
    """Reads the weights in `folder` into fused buffers."""
    return _Loader(Checkpoint(folder, progress), architecture, dtype, device).load()


class _Loader:
    def __init__(
        self, checkpoint: Checkpoint, architecture: Architecture, dtype: torch.dtype, device: str
    ) -> None:
        self._checkpoint = checkpoint
        self._architecture = architecture
        self._dtype = dtype
        self._device = device

    def load(self) -> Model:
        shape = self._architecture
        embedding = self._tensor("model.embed_tokens.weight", shape.vocabulary_size, shape.hidden)
        layers = [self._layer(index) for index in range(shape.layers)]
        norm = self._norm("model.norm.weight", shape.hidden)
        if shape.tied_embeddings:
            self._checkpoint.skip("lm_head.weight")
            head = Linear(embedding)
        else:
            head = Linear(self._tensor("lm_head.weight", shape.vocabulary_size, shape.hidden))
        self._checkpoint.finish()
        return Model(shape, embedding, layers, norm, head)

    def _layer(self, index: int) -> Layer:
        shape = self._architecture
        prefix = f"model.layers.{index}."
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        normed = shape.query_key_norm
        return Layer(
            attention_norm=self._norm(prefix + "input_layernorm.weight", shape.hidden),
            qkv=self._qkv(attention),
            query_norm=self._head_norm(attention + "q_norm.weight") if normed else None,
            key_norm=self._head_norm(attention + "k_norm.weight") if normed else None,
            output=Linear(
                *self._fused(
                    attention,
                    {"o_proj": shape.hidden},
                    shape.heads * shape.head_dim,
                    bias=shape.output_bias,
                )
            ),
            mlp_norm=self._norm(prefix + "post_attention_layernorm.weight", shape.hidden),
            gate_up=GatedLinear(
                *self._fused(
                    mlp,
                    {"gate_proj": shape.intermediate, "up_proj": shape.intermediate},
                    shape.hidden,
                    bias=shape.mlp_bias,
                )
            ),
            down=Linear(
                *self._fused(
                    mlp, {"down_proj": shape.hidden}, shape.intermediate, bias=shape.mlp_bias
                )
            ),
            window=shape.windows[index],
            rotates=shape.rotates[index],
        )

    def _qkv(self, prefix: str) -> Linear:
        shape = self._architecture
        query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        sizes = {"q_proj": query, "k_proj": key, "v_proj": key}
        weights = self._fused(
            prefix, sizes, shape.hidden, bias=shape.qkv_bias, rotated=("q_proj", "k_proj")
        )
        return Linear(*weights)

    def _fused(
        self,
        prefix: str,
        sizes: dict[str, int],
        inputs: int,
        *,
        bias: bool,
        rotated: tuple[str, ...] = (),
    ) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of projections of one input, {name: outputs}, as one."""
        weight = self._empty(sum(sizes.values()), inputs)
        biases = self._empty(sum(sizes.values())) if bias else None
        start = 0
        for name, size in sizes.items():
            arrange = self._interleave if name in rotated else None
            rows = slice(start, start + size)
            self._checkpoint.copy(f"{prefix}{name}.weight", weight[rows], arrange)
            if biases is not None:
                self._checkpoint.copy(f"{prefix}{name}.bias", biases[rows], arrange)
            start += size
        return weight, biases

    def _norm(self, name: str, size: int) -> RMSNorm:
        return RMSNorm(self._tensor(name, size), self._architecture.norm_epsilon)

    def _head_norm(self, name: str) -> RMSNorm:
        weight = self._empty(self._architecture.head_dim)
        self._checkpoint.copy(name, weight, self._interleave)
        return RMSNorm(weight, self._architecture.norm_epsilon)

    def _tensor(self, name: str, *shape: int) -> Tensor:
        tensor = self._empty(*shape)
        self._checkpoint.copy(name, tensor)
        return tensor

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self._dtype, device=self._device)

    @property
    def _interleave(self) -> Callable[[Tensor], Tensor]:
        return partial(interleave_pairs, head_dim=self._architecture.head_dim)
