"""Scales queries and keys so that keys lose less as int8 codes.

All numbers of a key share one scale. In some models a few of them are a hundred times as large as
the others, mostly by their biases, and the others are rounded away. So each number of a key is
divided by a factor, and the same number of a query multiplied by it. Factors are powers of two, so
products of queries and keys stay the same to the bit. Numbers that are rotated together share a
factor. Factors depend on the weights alone, so all workers have the same.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from baton.engine.architecture import Architecture
from baton.engine.model import Layer
from baton.engine.tensor_parallel import SummedNorms
from baton.kernels.linear import RMSNorm

KEYS, QUERIES = 0.7, 0.3
"""Exponents of a factor: it grows with the size of a key's number and falls with that of the
queries' one, since numbers that queries weigh most should lose least. Chosen on one model,
Qwen2.5-Coder-0.5B; (1, 0) made all numbers of a key equally large, and (0.5, 0.5) lost a third
more."""

LEAST = 2.0**-10
"""The least size of a number, as a share of its head's mean."""


def balance_keys(layer: Layer, shape: Architecture) -> Layer:
    """Applies the factors to the norms of queries and keys, or to qkv if there are none."""
    if layer.summed_norms:
        query, key = _balance_norms(layer.summed_norms.query, layer.summed_norms.key, shape)
        summed = SummedNorms(query, key, layer.summed_norms.group)
        return dataclasses.replace(layer, summed_norms=summed)
    if layer.query_norm and layer.key_norm:
        query, key = _balance_norms(layer.query_norm, layer.key_norm, shape)
        return dataclasses.replace(layer, query_norm=query, key_norm=key)
    return _balance_products(layer, shape)


def _balance_norms(query: RMSNorm, key: RMSNorm, shape: Architecture) -> tuple[RMSNorm, RMSNorm]:
    factors = _factors(query.wide.unsqueeze(1), key.wide.unsqueeze(1), shape.head_dim)
    return _scaled(query, _of_queries(factors, len(query.wide))), _scaled(key, 1 / factors)


def _scaled(norm: RMSNorm, factors: Tensor) -> RMSNorm:
    return RMSNorm(norm.weight * factors.flatten().to(norm.weight.dtype), norm.epsilon)


def _balance_products(layer: Layer, shape: Architecture) -> Layer:
    weight, bias = layer.qkv.weight, layer.qkv.bias
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    columns = weight if bias is None else torch.cat((weight, bias.unsqueeze(1)), dim=1)
    parts = columns[:queries], columns[queries : queries + keys]
    factors = _factors(*parts, shape.head_dim)
    both = torch.cat((_of_queries(factors, queries), (1 / factors).flatten())).to(weight.dtype)
    weight[: len(both)] *= both.unsqueeze(1)
    if bias is not None:
        bias[: len(both)] *= both
    return dataclasses.replace(layer, balance=both)


def _factors(queries: Tensor, keys: Tensor, head_dim: int) -> Tensor:
    """The factors of keys, [kv_heads, head_dim], from weights [outputs, inputs] of both."""
    kv_heads = len(keys) // head_dim
    sizes = KEYS * _sizes(keys, kv_heads, head_dim) - QUERIES * _sizes(queries, kv_heads, head_dim)
    return torch.exp2(sizes.round()).repeat_interleave(2, dim=1).float()


def _sizes(weights: Tensor, kv_heads: int, head_dim: int) -> Tensor:
    """The size of each pair of numbers, as the logarithm of its share of the mean,
    [kv_heads, pairs]."""
    squares = weights.double().square().sum(dim=1).view(kv_heads, -1, head_dim // 2, 2)
    sizes = squares.sum(dim=3).mean(dim=1).sqrt()
    return (sizes / sizes.mean(dim=1, keepdim=True)).clamp(min=LEAST).log2()


def _of_queries(factors: Tensor, size: int) -> Tensor:
    """[kv_heads, head_dim] -> [size]: several heads of queries share a key."""
    return factors.repeat_interleave(size // factors.numel(), dim=0).flatten()
