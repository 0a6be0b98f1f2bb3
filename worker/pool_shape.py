"""How an engine's pages lie in memory, in the transfer layer's words."""

from __future__ import annotations

from baton.engine.engine import Engine
from baton.kv_transfer.layout import LAYOUT_VERSION
from baton.kv_transfer.transport import PoolMemory
from baton.v1.transfer_pb2 import PoolLayout


def pool_memory(engine: Engine) -> PoolMemory:
    """The pages of this rank."""
    kv = engine.kv
    return PoolMemory(
        base=kv.data_ptr(),
        page_bytes=kv[0].numel() * kv.element_size(),
        total_pages=engine.pool.total,
        device=kv.device.type,
        device_id=kv.device.index or 0,
    )


def pool_layout(engine: Engine) -> PoolLayout:
    """Of whole pages, however many ranks share them."""
    model = engine.architecture
    return PoolLayout(
        version=LAYOUT_VERSION,
        model=engine.fingerprint,
        dtype=str(engine.kv.dtype).removeprefix("torch."),
        page_size=engine.pool.page_size,
        layers=model.layers,
        kv_heads=model.kv_heads,
        head_dim=model.head_dim,
    )
