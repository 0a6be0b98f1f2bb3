"""The GPUs that workers request from Ray, or their shares of one."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

from baton.core import config as configs
from baton.core.config import Config
from baton.core.errors import InvalidConfig
from baton.core.types import Role

# Tolerance for sums of GPU shares.
_ROUNDING = 1e-6


def gpus_per_rank(models: Sequence[Config], total: float, *, joined: bool) -> float:
    """Returns the GPUs of each worker process: one, or an equal share if there are too few.

    Raises InvalidConfig if there are too few on a Ray started here, which does not grow.
    """
    for config in models:
        named = joined and config.prefill.gpus and config.decode.gpus
        if config.device == "cuda" and not total and not named:
            raise InvalidConfig(
                "device is cuda, but Ray sees no GPU; if Ray adds nodes with GPUs on demand, say"
                " how many each worker wants (prefill.gpus, decode.gpus)",
                field="device",
            )
    on_gpus = [(config, role) for config in models if config.device != "cpu" for role in Role]
    if not on_gpus:
        return 0.0
    pools = [config.pool(role) for config, role in on_gpus]
    ranks = sum(pool.workers * pool.tensor_parallel for pool in pools)
    # Each GPU takes a whole number of shares: shares that only sum up to all GPUs may not fit.
    share = 1 / math.ceil(ranks / total) if total else 0.0
    wanted = sum(
        config.pool(role).workers * gpus_of(config, role, share) for config, role in on_gpus
    )
    if wanted > total + _ROUNDING and not joined:
        raise InvalidConfig(
            f"the workers want {wanted:g} GPUs, and there are {total:g}; use fewer workers or a"
            " smaller tensor_parallel",
            field="gpus",
        )
    return share


def gpus_of(config: Config, role: Role, share: float) -> float:
    """Returns the GPUs that a worker of this role requests from Ray, all on one node, since it is
    one actor. `share` is the share of one process."""
    pool = config.pool(role)
    if pool.gpus is not None:
        return pool.gpus
    if pool.tensor_parallel == 1 or not share:
        return share
    if share < 1 and config.ranks_share_gpus:
        return min(1.0, share * pool.tensor_parallel)
    return float(pool.tensor_parallel)


def within_share(config: Config, gpus: float) -> Config:
    """Returns `config` for a worker with `gpus`: a share of a GPU gets that share of its memory."""
    if config.gpu_memory or not 0 < gpus < 1:
        return config
    return dataclasses.replace(config, gpu_memory=configs.GPU_MEMORY * gpus)


def describe_wait(wanted: Mapping[str, float], nodes: Iterable[Mapping[str, float]]) -> str:
    """Says what a worker waits for that wants these resources on one node. `nodes` has each
    node's totals."""
    for node in nodes:
        if all(node.get(name, 0.0) >= amount for name, amount in wanted.items()):
            return "waiting for a place"
    asked = ", ".join(f"{name}: {amount:g}" for name, amount in wanted.items())
    return f"waiting for a node that has {asked}: none has"
