"""How an engine's pages lie in memory, in the transfer layer's words."""

from __future__ import annotations

from baton.v1.transfer_pb2 import PoolLayout
from engine.engine import Engine
from kv_transfer.layout import LAYOUT_VERSION
from kv_transfer.transport import PoolMemory


def pool_memory(engine: Engine) -> PoolMemory:
    kv = engine.kv
    return PoolMemory(
        base=kv.data_ptr(),
        page_bytes=kv[0].numel() * kv.element_size(),
        total_pages=engine.pool.total,
        device=kv.device.type,
        device_id=kv.device.index or 0,
    )


def pool_layout(engine: Engine) -> PoolLayout:
    # kv: [page, layer, k/v, token, kv_head, dim]
    _, layers, _, page_size, kv_heads, head_dim = engine.kv.shape
    return PoolLayout(
        version=LAYOUT_VERSION,
        model=engine.fingerprint,
        dtype=str(engine.kv.dtype).removeprefix("torch."),
        page_size=page_size,
        layers=layers,
        kv_heads=kv_heads,
        head_dim=head_dim,
    )
