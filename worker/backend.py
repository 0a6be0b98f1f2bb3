"""What a worker computes and transfers with: its model, its pages, and the ways to other workers.

    load()       on the engine thread: the engine belongs to it from the first moment
    take_over()  on the engine thread, after a change of roles
    close()      when the last engine thread has ended

What it holds stays when the role changes; only the role is another one.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from baton.core import model_store, types
from baton.core.config import Config, settle
from baton.core.errors import WorkerLost
from baton.engine.engine import Engine
from baton.engine.gpu.settings import GpuSettings
from baton.engine.page_memory import page_memory
from baton.kv_transfer.choose import choose_transport
from baton.kv_transfer.digest import choose_digest
from baton.kv_transfer.heads import HeadRange
from baton.kv_transfer.layout import cache_root
from baton.kv_transfer.sharded import ShardedTransport
from baton.kv_transfer.thread import TransferThread
from baton.worker.cache_feed import CacheFeed
from baton.worker.cpu import claim_threads, stand_back
from baton.worker.engine_thread import Inbox, Wake
from baton.worker.metrics import WorkerMetrics
from baton.worker.outbox import Outbox
from baton.worker.phases import role_factory
from baton.worker.pool_shape import pool_layout, pool_memory
from baton.worker.ranks import start_ranks
from baton.worker.role import Role
from baton.worker.second_tier import close_second_tier, open_second_tier

# For pages to be written to files.
FLUSH_SECONDS = 5.0

Progress = Callable[[str], None]


class Backend:
    """There is an engine and a transfer thread from `load` on."""

    def __init__(
        self,
        config: Config,
        worker_id: str,
        inbox: Inbox,
        outbox: Outbox,
        metrics: WorkerMetrics,
        *,
        progress: Progress,
        on_lost: Callable[[WorkerLost], None],
    ) -> None:
        """`on_lost` is called on any thread when a process that shares the model has ended."""
        self._device = config.device
        if self._device == "auto":
            self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._config = settle(config, self._device)
        self._worker_id = worker_id
        self._inbox = inbox
        self._outbox = outbox
        self._metrics = metrics
        self._progress = progress
        self._on_lost = on_lost
        self._loading: dict[str, int] = {}  # tenths told, by what is loaded

    def load(self, role: types.Role) -> tuple[Role, CacheFeed]:
        self._stand_back(role)
        self._load_engine(role)
        self.transfer = self._open_transfer()
        self._cache_feed = CacheFeed(self.engine.pool, self._outbox)
        return self._make(role), self._cache_feed

    def take_over(self, role: types.Role) -> tuple[Role, CacheFeed]:
        self._stand_back(role)
        threads = claim_threads(self._config, role, self.engine.split.size)
        gpu = self._ranks.settings.gpu if self._ranks else self._gpu_settings(role)
        self.engine.take_over(threads, gpu)
        self._metrics.take_role(role)
        return self._make(role), self._cache_feed

    @property
    def keeps_thread(self) -> bool:
        """Whether the thread that has run one role can run the other. What binds a thread, its
        priority or its part of a GPU, cannot be taken from it again."""
        return self._device != "cpu" and self._config.prefill.gpu_share == 1

    def close(self, *, for_good: bool) -> None:
        """Keeps the pages that are in files, unless the worker is not to come back."""
        close_second_tier(
            self.engine, self._config.cache, self._worker_id, FLUSH_SECONDS, for_good=for_good
        )
        self.transfer.stop()
        if self._ranks:
            self._ranks.close()

    def _make(self, role: types.Role) -> Role:
        make = role_factory(role)
        return make(self.engine, self.transfer, self._outbox, self._metrics, self._config)

    def _stand_back(self, role: types.Role) -> None:
        if self._device == "cpu" and role is types.Role.DECODE:
            stand_back(self._config.decode.nice)

    def _load_engine(self, role: types.Role) -> None:
        config = self._config
        dtype = config.dtype
        if dtype == "auto":
            dtype = "float32" if self._device == "cpu" else "bfloat16"
        self._progress("loading the model")
        gpu = self._gpu_settings(role)
        self._ranks = start_ranks(config, role, self._device, dtype, gpu, self._on_lost)
        self.engine = Engine.load(
            model_store.locate(config.model),
            dtype=dtype,
            device=self._ranks.settings.device if self._ranks else self._device,
            page_size=config.page_size,
            kv_memory=config.pool(role).kv_memory,
            max_context=config.max_context,
            threads=claim_threads(config, role),
            random_weights=config.weights == "random",
            gpu=self._ranks.settings.gpu if self._ranks else gpu,
            progress=self._report_loading,
            group=self._ranks.group if self._ranks else None,
        )
        if self._ranks:
            self._ranks.have_met()

    def _open_transfer(self) -> TransferThread:
        self._progress("opening the transfer layer")
        config = self._config
        memory, layout = pool_memory(self.engine), pool_layout(self.engine)
        if config.prefix_cache:
            self.engine.pool.root = cache_root(layout)
            open_second_tier(
                self.engine,
                config.cache,
                self._worker_id,
                lambda: self._inbox.put(Wake()),
                self._ranks.page_memory if self._ranks else page_memory,
            )
        digest = choose_digest(config.page_digests, memory)
        transport = ShardedTransport(
            choose_transport(config.transport, self._device),
            HeadRange(0, self.engine.kv.shape[4]),
            self._ranks.shards if self._ranks else (),
            digest=digest,
        )
        transfer = TransferThread(
            transport,
            memory,
            layout,
            self._inbox.put,
            digest=transport.digests if digest else None,
        )
        transfer.start()
        return transfer

    def _gpu_settings(self, role: types.Role) -> GpuSettings:
        """Ready for the steps of either role: the worker may change it."""
        prefill, decode = self._config.prefill, self._config.decode
        return GpuSettings(
            memory_share=self._config.gpu_memory,
            max_batch=decode.max_batch,
            chunk_tokens=max(prefill.chunk_tokens, decode.chunk_tokens),
            share=prefill.gpu_share if role is types.Role.PREFILL else 1.0,
        )

    def _report_loading(self, what: str, done: float) -> None:
        """Every tenth of it."""
        if int(done * 10) > self._loading.get(what, 0):
            self._loading[what] = int(done * 10)
            self._progress(f"preparing {what}: {done:.0%}")
