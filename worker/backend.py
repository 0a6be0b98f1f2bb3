"""A worker's engine, page pool, second tier and transfer thread.

    load()         on the engine thread, which owns the engine from then on
    switch_role()  on the engine thread, after a role switch
    close()        when the last engine thread has ended

All of it outlives a role switch; only the phase is replaced.
"""

from __future__ import annotations

import hashlib
import importlib
import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from baton.core import model_store
from baton.core.adapter_store import find_adapter
from baton.core.config import CacheConfig, Config, with_device_defaults
from baton.core.errors import AdapterMissing, InvalidConfig, WorkerLost
from baton.core.page_keys import KEY_SIZES
from baton.core.process import StartTimes
from baton.core.tls import node_identity
from baton.core.types import Role
from baton.engine.draft_model import find_draft, load_draft, locate_draft
from baton.engine.engine import DTYPES, Engine
from baton.engine.gpu.device import AdapterRoom, DraftRoom, GpuSettings
from baton.engine.model_choice import choose_dtype, describe_cpu, uses_fallback
from baton.engine.page_files import PageForm
from baton.engine.page_memory import PageMemory, page_memory
from baton.engine.second_tier import BATCH, SecondTier, second_tier_of
from baton.engine.tier_copies import BackgroundThread
from baton.engine.weight_codes import describe_quantization
from baton.kv_transfer.pool_layout import LAYOUT_VERSION, HeadRange, cache_root, choose_digest
from baton.kv_transfer.routed_transport import choose_transport
from baton.kv_transfer.sharded_transport import ShardedTransport
from baton.kv_transfer.transfer_thread import TransferThread
from baton.kv_transfer.transport import PoolMemory
from baton.v1.transfer_pb2 import PoolLayout
from baton.worker.adapter_files import fetch_adapter
from baton.worker.engine_thread import EngineInbox, Wake
from baton.worker.metrics import WorkerMetrics
from baton.worker.outbox import CacheFeed, Outbox
from baton.worker.phase import AnyPhase
from baton.worker.ranks import EXIT_SECONDS, Ranks, has_second_tier, rank_settings
from baton.worker.resources import claim_threads, lower_priority
from baton.worker.step_record import StepRecord

log = logging.getLogger(__name__)

_GIGABYTE = 10**9
# Limit for writing pages to files when the worker ends.
FLUSH_SECONDS = 5.0

PHASES = {
    Role.PREFILL: ("baton.prefill_worker.prefill_phase", "PrefillPhase"),
    Role.DECODE: ("baton.decode_worker.decode_phase", "DecodePhase"),
}
"""Modules and classes, by name, since this package imports neither phase."""

ReportProgress = Callable[[str], None]
MakeMemory = Callable[[Tensor, int], PageMemory]


class Backend:
    """`engine` and `transfer` exist once `load` has returned."""

    def __init__(
        self,
        config: Config,
        worker_id: str,
        inbox: EngineInbox,
        outbox: Outbox,
        metrics: WorkerMetrics,
        times: StartTimes,
        record: StepRecord,
        *,
        progress: ReportProgress,
        on_lost: Callable[[WorkerLost], object],
    ) -> None:
        """`on_lost` is called, on any thread, when another rank has ended."""
        self._device = config.device
        if self._device == "auto":
            self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._config = with_device_defaults(config, self._device)
        self._worker_id = worker_id
        self._inbox = inbox
        self._outbox = outbox
        self._metrics = metrics
        self._times = times
        self._record = record
        self._progress = progress
        self._on_lost = on_lost
        self._ranks: Ranks | None = None
        self._tenths: dict[str, int] = {}  # last reported, by what is being loaded

    def load(self, role: Role) -> tuple[AnyPhase, CacheFeed]:
        self._lower_priority(role)
        self._load_engine(role)
        self._times.mark("steps")
        self.transfer = self._open_transfer()
        self._times.mark("transfer")
        if folder := self._config.embedding_model:
            self._progress("loading the embedding model")
            self.engine.load_encoder(Path(folder).expanduser())
            self._times.mark("embedding model")
        if self._config.allowed_adapters:
            self._open_adapters(self._config.allowed_adapters)
        self._load_draft(role)
        self._cache_feed = CacheFeed(self.engine.pool, self._outbox)
        return self._make_phase(role), self._cache_feed

    def switch_role(self, role: Role) -> tuple[AnyPhase, CacheFeed]:
        self._lower_priority(role)
        threads = claim_threads(self._config, role, self.engine.split.size)
        # Ranks have the same settings for both roles.
        self.engine.reconfigure(threads, None if self._ranks else self._gpu_settings(role))
        self._load_draft(role)
        self._metrics.set_role(role)
        return self._make_phase(role), self._cache_feed

    def failure_reason(self, error: BaseException) -> BaseException:
        """Returns the loss of a rank if one caused `error`, else `error`.

        Waits for a lost rank's exit status, which comes after steps and transfers have failed.
        """
        return (self._ranks.lost(EXIT_SECONDS) if self._ranks else None) or error

    @property
    def keeps_thread(self) -> bool:
        """True if one engine thread can run both roles. A thread's lowered priority or its share
        of a GPU cannot be undone."""
        return self._device != "cpu" and self._config.prefill.gpu_share == 1

    def close(self, *, for_good: bool) -> None:
        """Keeps the pages in files unless the worker leaves for good."""
        close_second_tier(
            self.engine, self._config.cache, self._worker_id, FLUSH_SECONDS, for_good=for_good
        )
        self.transfer.stop()
        if self.engine.adapters:
            self.engine.adapters.close()
        if self._ranks:
            self._ranks.close()

    def _make_phase(self, role: Role) -> AnyPhase:
        module, name = PHASES[role]
        make: Callable[..., AnyPhase] = getattr(importlib.import_module(module), name)
        return make(
            self.engine, self.transfer, self._outbox, self._metrics, self._config, self._record
        )

    def _lower_priority(self, role: Role) -> None:
        if self._device == "cpu" and role is Role.DECODE:
            lower_priority(self._config.decode.nice)

    def _load_engine(self, role: Role) -> None:
        config = self._config
        folder = self._locate_model()
        fallback = uses_fallback(folder, config.engine)
        dtype = choose_dtype(config.dtype, self._device, fallback=fallback)
        native_cpu = self._device == "cpu" and not fallback
        how = describe_cpu(dtype) if native_cpu else dtype
        codes = describe_quantization(config.quantization, dtype, self._device)
        self._progress(f"loading the model in {how}{codes}")
        gpu = self._gpu_settings(role)
        settings, devices = rank_settings(config, folder, role, self._device, dtype, gpu)
        self._times.mark("config")
        if settings.size == 1:
            self.engine = settings.load(device=settings.device, progress=self._report_loading)
            return
        second_tier = has_second_tier(config)
        self._ranks = Ranks(settings, devices, self._on_lost, second_tier=second_tier)
        self.engine = settings.load(
            device=settings.device, group=self._ranks.group, progress=self._report_loading
        )
        self._ranks.remove_rendezvous()

    def _load_draft(self, role: Role) -> None:
        """Loads the draft model on a decode worker. On a prefill worker, checks that a role switch
        could load it."""
        decoding = role is Role.DECODE
        folder = find_draft(
            self._config, self._locate_model(), weights=decoding and self._config.weights == "files"
        )
        if folder and decoding and not self.engine.draft:
            self._progress("loading the draft model")
            self.engine.draft = load_draft(self._config, folder, self.engine)
            self._times.mark("draft model")

    def _locate_model(self) -> Path:
        """Returns the model's folder. Downloads a hub's model if needed and reports each
        gigabyte."""
        gigabytes = -1

        def report(size: int) -> None:
            nonlocal gigabytes
            if size // _GIGABYTE > gigabytes:
                gigabytes = size // _GIGABYTE
                self._progress(f"downloading the model: {gigabytes} GB")

        weights = self._config.weights == "files"
        return model_store.locate(self._config.model, weights=weights, report=report)

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
            head_range(self.engine),
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

    def _open_adapters(self, allowed: tuple[str, ...]) -> None:
        """Loads the first of the configured adapters, so that a bad one is found at once."""
        slots = self._config.adapter_slots
        fetch = partial(fetch_adapter, identity=node_identity(self._config))
        pool = self.engine.open_adapters(slots, allowed, lambda: self._inbox.put(Wake()), fetch)
        for name, folder in list(self._config.adapters.items())[:slots]:
            self._progress(f"loading adapter {name}")
            try:
                pool.load_now(find_adapter(folder))
            except AdapterMissing as error:  # routers name workers that have it
                log.warning("adapter %s will be fetched when it is needed: %s", name, error.message)
        self._times.mark("adapters")

    def _gpu_settings(self, role: Role) -> GpuSettings:
        """Settings for the steps of either role, since the role may be switched."""
        prefill, decode = self._config.prefill, self._config.decode
        settings = GpuSettings(
            memory_share=self._config.gpu_memory,
            max_batch=decode.max_batch,
            chunk_tokens=max(prefill.chunk_tokens, decode.chunk_tokens),
            share=prefill.gpu_share if role is Role.PREFILL else 1.0,
            numerics=self._config.numerics,
            adapters=self._adapter_room(),
            guesses=self._may_guess(),
        )
        return replace(settings, draft=self._draft_room(settings))

    def _draft_room(self, main: GpuSettings) -> DraftRoom | None:
        """The draft model's memory, also on a prefill worker: a role switch loads the model."""
        config = self._config
        if self._device == "cpu" or not config.draft_model:
            return None
        from baton.engine.gpu.draft_room import draft_room  # imports triton

        dtype = DTYPES[choose_dtype(config.dtype, self._device)]
        return draft_room(config, locate_draft(config, weights=False), dtype, main)

    def _may_guess(self) -> bool:
        if self._config.speculation == "auto":
            return self._config.numerics == "invariant"
        return self._config.speculation != "off"

    def _adapter_room(self) -> AdapterRoom | None:
        config = self._config
        if not config.allowed_adapters:
            return None
        return AdapterRoom(config.adapter_slots, config.adapter_rank, config.adapter_memory)

    def _report_loading(self, what: str, done: float) -> None:
        """Reports each tenth of what is loaded in parts."""
        self._times.mark(what)
        if done == 1.0 and what not in self._tenths:
            return
        if int(done * 10) > self._tenths.setdefault(what, 0):
            self._tenths[what] = int(done * 10)
            self._progress(f"preparing {what}: {done:.0%}")


def pool_memory(engine: Engine) -> PoolMemory:
    """The memory of this rank's pages."""
    kv = engine.kv
    return PoolMemory(
        base=kv.data_ptr(),
        page_bytes=kv[0].nbytes,
        total_pages=engine.pool.total,
        device=kv.device.type,
        device_id=kv.device.index or 0,
    )


def head_range(engine: Engine) -> HeadRange:
    """The key heads in this rank's pages. A latent counts as one head, which every rank holds."""
    heads: int = engine.kv.shape[4]
    rank = 0 if heads == engine.architecture.kv_heads else engine.split.rank
    return HeadRange(rank * heads, heads)


def pool_layout(engine: Engine) -> PoolLayout:
    """The layout of whole pages, over all ranks."""
    model, stored = engine.architecture, _dtype_name(engine.kv.dtype)
    if engine.kv.dtype != engine.dtype:  # quantized from values of the engine's dtype
        stored += f" from {_dtype_name(engine.dtype)}"
        if engine.kv.device.type == "cuda":
            stored += ", aligned"
    return PoolLayout(
        version=LAYOUT_VERSION,
        model=engine.fingerprint,
        dtype=stored,
        page_size=engine.pool.page_size,
        layers=model.slices.layers,
        kv_heads=model.kv_heads,
        head_dim=model.head_dim,
        windows=[window or 0 for window in model.slices.windows] if any(model.windows) else (),
    )


def _dtype_name(dtype: torch.dtype) -> str:
    """Pages in int4 are uint8 in torch, which lacks int4."""
    return "int4" if dtype == torch.uint8 else str(dtype).removeprefix("torch.")


def open_second_tier(
    engine: Engine,
    config: CacheConfig,
    worker_id: str,
    wake: Callable[[], None],
    make_memory: MakeMemory = page_memory,
) -> None:
    """Attaches a second tier to the pool if host memory or files are configured.

    The pool's root must be set. `make_memory` allocates rows for whole pages, over all ranks.
    """
    root, kv, ranks = engine.pool.root, engine.kv, engine.split.size
    if root is None or not (config.host_memory or config.files):
        return
    page_bytes = kv[0].nbytes * ranks
    if 0 < config.host_memory < page_bytes:
        raise InvalidConfig(
            f"{config.host_memory} bytes hold no page: one takes {page_bytes}",
            field="cache.host_memory",
        )
    # Pages pass through host memory on their way to files.
    rows = max(config.host_memory // page_bytes, BATCH if config.files else 0)
    tier = SecondTier(engine.pool, make_memory(kv, rows), wake, BackgroundThread)
    if config.files:
        form = PageForm(
            root=_files_root(root, ranks),
            dtype=_dtype_name(kv.dtype),
            page_size=engine.pool.page_size,
            page_bytes=page_bytes,
            key_bytes=KEY_SIZES[engine.pool.slices > 1],
        )
        tier.open_files(_folder(config, form.root, worker_id), config.files_budget, form)


def close_second_tier(
    engine: Engine, config: CacheConfig, worker_id: str, seconds: float, *, for_good: bool
) -> None:
    """Writes pages to files for at most `seconds`. Removes the files if the worker leaves for
    good, since no other worker would find them."""
    tier, root = second_tier_of(engine.pool), engine.pool.root
    if tier is None or root is None:
        return
    tier.close(seconds, save=not for_good)
    if for_good and config.files:
        root = _files_root(root, engine.split.size)
        shutil.rmtree(_folder(config, root, worker_id), ignore_errors=True)


def _files_root(root: bytes, ranks: int) -> bytes:
    """Files hold the heads rank by rank, so the number of ranks is part of their folder's name."""
    if ranks == 1:
        return root
    return hashlib.blake2b(root, digest_size=len(root), person=b"ranks-%d" % ranks).digest()


def _folder(config: CacheConfig, root: bytes, worker_id: str) -> Path:
    return Path(config.files).expanduser() / root.hex() / worker_id
