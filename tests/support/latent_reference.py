"""Reference implementations of the GPU kernels for latents, as those of kernel_reference.py."""

from __future__ import annotations

import torch
from kernel_reference import normed, rotated, settled
from torch import Tensor

from baton.kernels.gpu.latent_projection import LatentSizes
from baton.kernels.gpu.low_rank import AdapterStack, SlotRows
from baton.kernels.gpu.rotary import Projected


def norm_queries(projected: Projected, norm: Tensor, epsilon: float) -> Tensor:
    """The first len(norm) columns, settled and normed."""
    queries = settled(projected.qkv, projected.source, None)[:, : len(norm)]
    return normed(queries, norm, epsilon).to(projected.qkv.dtype)


def rotate_and_store_latents(
    projected: Projected,
    cos_sin: Tensor,
    positions: Tensor,
    stores: Tensor,
    kv_layer: Tensor,
    sizes: LatentSizes,
    key_norm: Tensor,
    absorbed: Tensor,
) -> Tensor:
    """The queries' plain part [T, heads, plain]; the rotated one goes into absorbed."""
    made = settled(projected.qkv, projected.source, None)
    queries = made[:, : -sizes.latent] if projected.queries is None else projected.queries.double()
    queries = queries.reshape(len(made), sizes.heads, -1)
    turns = cos_sin[positions.long()].double()
    absorbed[..., sizes.rank :] = rotated(queries[..., sizes.plain :], turns)
    rows = made[:, -sizes.latent :]
    rows = torch.cat(
        (
            normed(rows[:, : sizes.rank], key_norm, sizes.epsilon),
            rotated(rows[:, None, sizes.rank :], turns).squeeze(1),
        ),
        dim=1,
    )
    live = stores >= 0
    pages, offsets = stores[live] // kv_layer.shape[2], stores[live] % kv_layer.shape[2]
    kv_layer[pages, 0, offsets, 0] = rows[live].to(kv_layer.dtype)
    return queries[..., : sizes.plain].to(projected.qkv.dtype)


def chunk_latents(
    query: Tensor,
    blocks: Tensor,
    page_table: Tensor,
    kv_layer: Tensor,
    sizes: LatentSizes,
    out: Tensor,
) -> Tensor:
    """query [T, heads, rank + rotated] -> out [T, heads, rank], for the rows of blocks."""
    size = kv_layer.shape[2]
    for row, start, count, slot in blocks[blocks[:, 2] > 0].tolist():
        tokens = torch.arange(start + count, device=query.device)
        rows = kv_layer[page_table[slot, tokens // size].long(), 0, tokens % size, 0].double()
        scores = torch.einsum("thd,nd->htn", query[row : row + count].double(), rows) * sizes.scale
        queries = torch.arange(start, start + count, device=query.device).unsqueeze(1)
        weights = scores.masked_fill(tokens > queries, -torch.inf).softmax(dim=-1)
        out[row : row + count] = torch.einsum("htn,nd->thd", weights, rows[:, : sizes.rank])
    return out


def absorb(queries: Tensor, stack: AdapterStack, rows: SlotRows, absorbed: Tensor) -> None:
    """queries [T, heads, plain]; absorbed [T, heads, latent] += queries through B, then A."""
    for row, slot in enumerate(rows.slots.tolist()):
        if slot >= 0:
            b = stack.b[slot].double().unflatten(0, (queries.shape[1], -1))[:, : queries.shape[2]]
            shrunk = torch.einsum("hk,hkr->hr", queries[row].double(), b).to(queries.dtype)
            absorbed[row] = absorbed[row].double() + shrunk.double() @ stack.a[slot].double()


def expand(attended: Tensor, stack: AdapterStack, rows: SlotRows, values: Tensor) -> None:
    """attended [T, heads, latent]; values [T, heads, value] += attended through A, then B."""
    for row, slot in enumerate(rows.slots.tolist()):
        if slot >= 0:
            b = stack.b[slot].double().unflatten(0, (values.shape[1], -1))[:, -values.shape[2] :]
            shrunk = (attended[row].double() @ stack.a[slot].double().t()).to(values.dtype)
            added = torch.einsum("hr,hvr->hv", shrunk.double(), b)
            values[row] = values[row].double() + added
