"""Reference implementations of the GPU kernels in plain torch, for any device.

Names and arguments are those of kernels/gpu. Sums and products are made in float64 and
rounded to the result's type once.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

from baton.kernels.gpu.low_rank import ProductAdapters, Shrunk
from baton.kernels.gpu.norm import Scaled
from baton.kernels.gpu.rotary import LOG2_E, HeadShape, Projected
from baton.kernels.gpu.splits import SplitWorkspace
from baton.kernels.linear import SWIGLU_ALPHA, SWIGLU_LIMIT, Activation
from baton.kernels.noise import add_noise

WEIGHT_ONE = 2.0**40
COLDEST = 1e-10


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """x [T, H], weight [H] -> [T, H]."""
    return normed(x.double(), weight, epsilon).to(x.dtype)


def scale_rows(
    residual: Tensor,
    weight: Tensor | None,
    epsilon: float,
    parts: Tensor | None = None,
    after: Tensor | None = None,
) -> Scaled:
    """residual [T, H], which becomes the sum with parts [n, T, H]; scaled by weight [H]."""
    if parts is not None:
        if after is not None:
            parts = normed(parts.double(), after, epsilon).to(parts.dtype)
        residual.copy_(residual.double() + parts.double().sum(dim=0))
    if weight is None:
        return Scaled(residual, None, epsilon)
    if residual.dtype is torch.float16:
        return Scaled(rms_norm(residual, weight, epsilon), None, epsilon)
    squares = residual.double().square().sum(dim=-1).float()[None]
    return Scaled((residual.double() * weight.double()).to(residual.dtype), squares, epsilon)


def embed(
    tokens: Tensor, embedding: Tensor, weight: Tensor, epsilon: float, scale: float = 1.0
) -> tuple[Tensor, Scaled]:
    """tokens [T] -> their embeddings [T, H], and scaled by weight [H]."""
    residual = (embedding[tokens.long()].double() * scale).to(embedding.dtype)
    return residual, scale_rows(residual, weight, epsilon)


def gate_and_multiply(
    gate_up: Tensor, source: Scaled, bias: Tensor | None, activation: Activation
) -> Tensor:
    """gate_up [T, 2 * size], the product of `source` -> [T, size]."""
    gate, up = settled(gate_up, source, bias).chunk(2, dim=-1)
    if activation == "clamped_swiglu":
        gate, up = gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT) + 1.0
        return (gate * (gate * SWIGLU_ALPHA).sigmoid() * up).to(gate_up.dtype)
    opened = silu(gate) if activation == "silu" else gelu(gate, approximate="tanh")
    return (opened * up).to(gate_up.dtype)


def few_rows(
    source: Scaled,
    weight: Tensor,
    bias: Tensor | None = None,
    gates: Activation | None = None,
    adapters: ProductAdapters | None = None,
) -> Tensor:
    """source [M, K] and weight [N, K] -> [M, N], or [M, N / 2] with gates."""
    product = few_rows_alone(source.x, weight)
    if adapters:
        expand_onto(product, shrink(source.x, adapters))
    if gates:
        return gate_and_multiply(product, source, bias, gates)
    return settled(product, source, bias).to(product.dtype)


def few_rows_alone(x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
    """x [M, K] and weight [N, K] -> [M, N]."""
    return _result(x.double() @ weight.double().t(), x.dtype, out)


def few_rows_onto(
    x: Tensor,
    weight: Tensor,
    residual: Tensor,
    norm: Tensor,
    epsilon: float,
    bias: Tensor | None = None,
    adapters: ProductAdapters | None = None,
) -> Scaled:
    """residual [M, N] += x [M, K] @ weight.T + bias; and scaled by norm [N]."""
    product = few_rows_alone(x, weight)
    if adapters:
        expand_onto(product, shrink(x, adapters))
    product = settled(product, None, bias).to(x.dtype)
    return scale_rows(residual, norm, epsilon, product[None])


def shrink(x: Tensor, adapters: ProductAdapters) -> Shrunk:
    """x [T, K] and a [slots, parts * rank, K] -> [parts, T, rank]; zeros without an adapter."""
    stack = adapters.stack
    out = torch.zeros(len(stack.ends), len(x), stack.rank, device=x.device)
    for row, slot in enumerate(adapters.rows.slots.tolist()):
        if slot >= 0:
            out[:, row] = (stack.a[slot].double() @ x[row].double()).view(len(stack.ends), -1)
    return Shrunk(out.to(stack.b.dtype), adapters)


def expand_onto(product: Tensor, shrunk: Shrunk) -> None:
    """product [T, N] += b [slots, N, rank] of each row's slot times what its inputs shrank to."""
    stack, x = shrunk.adapters.stack, shrunk.parts.double()
    for row, slot in enumerate(shrunk.adapters.rows.slots.tolist()):
        if slot < 0:
            continue
        for part, (start, end) in enumerate(zip((0, *stack.ends), stack.ends, strict=False)):
            added = stack.b[slot, start:end].double() @ x[part, row]
            product[row, start:end] = product[row, start:end].double() + added


def settled(product: Tensor, source: Scaled | None, bias: Tensor | None) -> Tensor:
    """A product [M, N] times its rows' sizes, plus the bias; float64."""
    settled = product.double()
    if source is not None and source.squares is not None:
        mean = source.squares.double().sum(dim=0) / source.x.shape[1]
        settled = settled * (mean + source.epsilon).rsqrt().unsqueeze(1)
    return settled if bias is None else settled + bias.double()


def merge_attended(
    attended: Tensor, weight: Tensor, earlier: Tensor, earlier_weight: Tensor
) -> None:
    """attended [1, heads, T, dim] and weight [1, heads, T, 1] become those of both parts."""
    weights = torch.stack((weight, earlier_weight)).double()
    shares = weights.softmax(dim=0)
    attended.copy_(attended.double() * shares[0] + earlier.double() * shares[1])
    weight.copy_(weights.logsumexp(dim=0))


def begin(
    staged: Tensor, rows: Tensor, last_tokens: Tensor, tokens: Tensor, table: Tensor, pages: Tensor
) -> None:
    """staged [T] with -1 for last_tokens[rows] -> tokens [T]; pages [n, 2] go into the table."""
    tokens.copy_(torch.where(staged < 0, last_tokens[rows.long()], staged).clamp(min=0))
    table.view(-1)[pages[:, 0].long()] = pages[:, 1]


def remember(sampled: Tensor, rows: Tensor, last_tokens: Tensor) -> None:
    """last_tokens[rows] = sampled."""
    last_tokens[rows.long()] = sampled


def decode_attention(
    projected: Projected,
    cos_sin: Tensor,
    rows: Tensor,
    positions: Tensor,
    page_table: Tensor,
    kv_layer: Tensor,
    shape: HeadShape,
    workspace: SplitWorkspace,
    out: Tensor,
    query_norm: Tensor | None = None,
    key_norm: Tensor | None = None,
) -> Tensor:
    """One new token per sequence -> out [B, heads * dim]."""
    size = kv_layer.shape[2]
    live = positions >= 0
    pages = page_table[rows.long(), positions.clamp(min=0).long() // size].long()
    known = positions.clamp(min=0)
    mine = Projected(projected.qkv.clone(), projected.source, projected.bias)
    slots = torch.where(live, pages * size + positions % size, -1)
    rotate_and_store(mine, cos_sin, known, slots, kv_layer, shape, query_norm, key_norm)
    blocks = torch.stack((torch.arange(len(rows), device=rows.device), positions, live, rows), 1)
    return chunk_attention(mine.qkv, blocks, page_table, kv_layer, shape, out)


def chunk_attention(
    qkv: Tensor,
    blocks: Tensor,
    page_table: Tensor,
    kv_layer: Tensor,
    shape: HeadShape,
    out: Tensor,
) -> Tensor:
    """qkv [T, ...], rotated and stored -> out [T, heads * dim], for the rows of blocks."""
    size, group = kv_layer.shape[2], shape.heads // shape.kv_heads
    for row, start, count, slot in blocks[blocks[:, 2] > 0].tolist():
        tokens = torch.arange(start + count, device=qkv.device)
        pages = page_table[slot, tokens // size].long()
        keys, values = kv_layer[pages, :, tokens % size].double().unbind(1)
        mine = qkv[row : row + count].view(count, -1, shape.head_dim)[:, : shape.heads].double()
        grouped = mine.view(count, shape.kv_heads, group, shape.head_dim)
        scores = torch.einsum("tkgd,nkd->kgtn", grouped, keys) * shape.scoring.scale
        if shape.scoring.cap is not None:
            scores = (scores / shape.scoring.cap).tanh() * shape.scoring.cap
        queries = torch.arange(start, start + count, device=qkv.device).unsqueeze(1)
        hidden = tokens > queries
        if shape.window is not None:
            hidden |= tokens <= queries - shape.window
        scores = scores.masked_fill(hidden, -torch.inf)
        if shape.sinks is not None:
            sinks = shape.sinks.double().view(shape.kv_heads, group, 1, 1) / LOG2_E
            scores = torch.cat((scores, sinks.expand(-1, -1, count, 1)), dim=-1)
        weights = scores.softmax(dim=-1)[..., : len(tokens)]
        out[row : row + count] = torch.einsum("kgtn,nkd->tkgd", weights, values).flatten(1)
    return out


def norm_projections(
    projected: Projected, query_norm: Tensor, key_norm: Tensor, epsilon: float
) -> Projected:
    """qkv [T, ...] becomes settled, with all queries and all keys of a row normed together."""
    qkv = projected.qkv
    qkv.copy_(settled(qkv, projected.source, projected.bias))
    for part, norm in zip(
        qkv.split((len(query_norm), len(key_norm), len(key_norm)), dim=1),
        (query_norm, key_norm),
        strict=False,
    ):
        part.copy_(normed(part.double(), norm, epsilon))
    return Projected(qkv)


def rotate_and_store(
    projected: Projected,
    cos_sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    kv_layer: Tensor,
    shape: HeadShape,
    query_norm: Tensor | None = None,
    key_norm: Tensor | None = None,
) -> None:
    """Queries, keys and values are settled and rotated in place, and stored in
    kv_layer [page, 2, token, kv_head, dim]."""
    heads, kv_heads = shape.heads, shape.kv_heads
    qkv = projected.qkv
    qkv.copy_(settled(qkv, projected.source, projected.bias))
    by_head = qkv.view(len(qkv), heads + 2 * kv_heads, -1)
    queries, keys, values = by_head.tensor_split((heads, heads + kv_heads), dim=1)
    for part, norm in ((queries, query_norm), (keys, key_norm)):
        if norm is not None:
            part.copy_(normed(part.double(), norm, shape.epsilon))
        if shape.rotates:
            part.copy_(rotated(part.double(), cos_sin[positions.long()].double()))
    stored = slots >= 0
    pages, offsets = slots[stored] // kv_layer.shape[2], slots[stored] % kv_layer.shape[2]
    kv_layer[pages, 0, offsets] = keys[stored]
    kv_layer[pages, 1, offsets] = values[stored]


def copy_pages(
    source: int, target: int, page_bytes: int, source_pages: Tensor, target_pages: Tensor
) -> None:
    """Copies page source_pages[i] at address source to page target_pages[i] at target."""
    copy_rows(source, target, page_bytes, (page_bytes, page_bytes), source_pages, target_pages)


def copy_rows(
    source: int,
    target: int,
    row_bytes: int,
    strides: tuple[int, int],
    source_rows: Tensor,
    target_rows: Tensor,
) -> None:
    """Copies row source_rows[i] at address source to row target_rows[i] at target."""
    source_memory = _memory(source, source_rows, row_bytes, strides[0])
    target_memory = _memory(target, target_rows, row_bytes, strides[1])
    target_memory[target_rows.long()] = source_memory[source_rows.long()]


def digest_pages(source: int, page_bytes: int, pages: Tensor, out: Tensor) -> None:
    """Adds to out [n], int32, the digest of each of pages [n] at address source."""
    words = _memory(source, pages, page_bytes)[pages.long()].view(torch.int32).long()
    place = torch.arange(words.shape[1], device=words.device)
    mixed = (words ^ place * 0x9E3779B1) & 0xFFFFFFFF
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
        mixed = (mixed ^ mixed >> shift) * factor & 0xFFFFFFFF
    out += mixed.sum(dim=1).to(torch.int32)


def gather_tokens(
    kv_layer: Tensor, pages: Tensor, length: int, out_keys: Tensor, out_values: Tensor
) -> None:
    """The first `length` tokens of pages of kv_layer [page, 2, token, kv_head, dim], as rows."""
    keys, values = kv_layer[pages.long()].unbind(dim=1)
    out_keys[:length] = keys.flatten(0, 1)[:length]
    out_values[:length] = values.flatten(0, 1)[:length]


def argmax(logits: Tensor, out: Tensor | None = None) -> Tensor:
    """logits [B, V] -> [B], int32: the best tokens, -1 where a row is not finite."""
    values = logits.amax(dim=-1)
    lowest = (logits == values.unsqueeze(1)).int().argmax(dim=-1)
    return _result(torch.where(values.isfinite(), lowest, -1), torch.int32, out)


def sample(
    logits: Tensor,
    temperatures: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    keys: Tensor,
    out: Tensor | None = None,
) -> Tensor:
    """logits [B, V], all others [B] -> [B], int32."""
    best = argmax(logits)
    scores = logits.float()
    relative = scores - scores.amax(dim=-1, keepdim=True)
    relative /= temperatures.clamp(min=COLDEST).unsqueeze(1)
    drawn = draw(relative, weigh(logits, temperatures), top_k, top_p, min_p, keys)
    greedy = (best < 0) | (temperatures == 0) | (top_k == 1)
    return _result(torch.where(greedy, best, drawn), torch.int32, out)


def weigh(logits: Tensor, temperatures: Tensor) -> Tensor:
    """logits [B, V], temperatures [B] -> [B, V], float32, whole numbers."""
    scores = logits.float()
    relative = scores - scores.amax(dim=-1, keepdim=True)
    divisors = temperatures.clamp(min=COLDEST).unsqueeze(1)
    return relative.div(divisors).exp().mul(WEIGHT_ONE).floor()


def draw(
    relative: Tensor, weights: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, keys: Tensor
) -> Tensor:
    """relative (logits over temperatures) and weights [B, V], all others [B] -> [B], int32."""
    settings = zip(top_k.tolist(), top_p.tolist(), min_p.tolist(), strict=True)
    kept = torch.stack([_kept(row, *each) for row, each in zip(weights, settings, strict=True)])
    noisy = add_noise(relative.masked_fill(~kept, -torch.inf), keys)
    return noisy.argmax(dim=-1).to(torch.int32)


def _kept(weights: Tensor, top_k: int, top_p: float, min_p: float) -> Tensor:
    """weights [V] -> [V], bool: the tokens that the filters leave."""
    if top_k == 0 and top_p >= 1.0 and min_p == 0.0:
        return torch.ones_like(weights, dtype=torch.bool)
    if 0 < top_k < len(weights):
        ordered = weights.sort(descending=True).values
        weights = weights * (weights >= ordered[top_k - 1])
    if top_p < 1.0:
        ordered = weights.sort(descending=True).values
        reached = ordered.cumsum(0, dtype=torch.int64)
        needed = min(int(float(reached[-1]) * top_p), int(reached[-1]))
        weights = weights * (weights >= ordered[int((reached < needed).sum())])
    return (weights > 0.0) & (weights >= min_p * WEIGHT_ONE)


def _result(result: Tensor, dtype: torch.dtype, out: Tensor | None) -> Tensor:
    return result.to(dtype) if out is None else out.copy_(result)


def normed(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return x * (x.square().mean(dim=-1, keepdim=True) + epsilon).rsqrt() * weight.double()


def rotated(x: Tensor, cos_sin: Tensor) -> Tensor:
    """x [T, heads, dim] by cos_sin [T, dim]."""
    cos, sin = cos_sin.unsqueeze(1).chunk(2, dim=-1)
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * torch.complex(cos, sin)).flatten(-2)


class _Mapping:
    """Device memory at an address, in the form that torch imports."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (size,),
            "typestr": "|u1",
            "version": 3,
        }


def _memory(address: int, pages: Tensor, page_bytes: int, stride: int | None = None) -> Tensor:
    """[pages, page_bytes], up to the highest id; `stride` bytes apart, if not contiguous."""
    stride = stride or page_bytes
    count = int(pages.max()) + 1
    size = (count - 1) * stride + page_bytes
    if pages.is_cuda:
        flat = torch.as_tensor(_Mapping(address, size), device=pages.device)
    else:
        flat = torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=torch.uint8)
    return flat.as_strided((count, page_bytes), (stride, 1))
