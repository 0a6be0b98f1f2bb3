"""What a worker asks Ray for, and what it waits for."""

from __future__ import annotations

import pytest

from baton.cluster.actors import sized_for
from baton.cluster.gpu_shares import describe_wait, gpus_of, gpus_per_rank, within_share
from baton.core.config import Config, DecodeConfig, PrefillConfig, with_device_defaults
from baton.core.errors import InvalidConfig
from baton.core.types import Role


@pytest.mark.parametrize(
    ("prefill", "share", "may_share", "wanted"),
    [
        (PrefillConfig(), 0.0, False, 0.0),
        (PrefillConfig(), 1.0, False, 1.0),
        (PrefillConfig(), 0.25, False, 0.25),
        (PrefillConfig(gpus=0.5), 1.0, False, 0.5),
        (PrefillConfig(tensor_parallel=2), 0.0, False, 0.0),
        (PrefillConfig(tensor_parallel=2), 1.0, False, 2.0),
        # Never less than one for each process, unless they may share.
        (PrefillConfig(tensor_parallel=4), 0.5, False, 4.0),
        (PrefillConfig(tensor_parallel=2), 0.25, True, 0.5),
        (PrefillConfig(tensor_parallel=4), 0.5, True, 1.0),
        (PrefillConfig(tensor_parallel=2, gpus=3), 1.0, False, 3.0),
    ],
)
def test_a_worker_asks_for_a_gpu_for_each_of_its_processes(
    prefill: PrefillConfig, share: float, may_share: bool, wanted: float
) -> None:
    decode = DecodeConfig(tensor_parallel=8)
    config = Config(prefill=prefill, decode=decode, ranks_share_gpus=may_share)
    assert gpus_of(config, Role.PREFILL, share) == wanted


def test_processes_share_the_gpus() -> None:
    config = Config(prefill=PrefillConfig(workers=2), decode=DecodeConfig(workers=2))
    assert gpus_per_rank([config], 8, joined=False) == 1
    assert gpus_per_rank([config], 1, joined=False) == 0.25
    # Not three quarters: three GPUs have no room for the fourth.
    assert gpus_per_rank([config], 3, joined=False) == 0.5
    assert gpus_per_rank([config], 0, joined=False) == 0
    assert gpus_per_rank([Config(device="cpu")], 8, joined=False) == 0


def test_workers_that_share_a_gpu_share_its_memory_by_default() -> None:
    assert within_share(Config(), 0.5).gpu_memory == 0.45
    assert within_share(Config(gpu_memory=0.3), 0.5).gpu_memory == 0.3
    for whole in (0.0, 1.0, 2.0):
        assert with_device_defaults(within_share(Config(), whole), "cuda").gpu_memory == 0.9


def test_too_few_gpus_are_an_error_unless_the_cluster_can_grow() -> None:
    config = Config(
        prefill=PrefillConfig(tensor_parallel=2), decode=DecodeConfig(tensor_parallel=2)
    )
    assert gpus_per_rank([config], 4, joined=False) == 1
    with pytest.raises(InvalidConfig, match="the workers want 4 GPUs, and there are 2"):
        gpus_per_rank([config], 2, joined=False)
    assert gpus_per_rank([config], 2, joined=True) == 0.5


def test_a_cluster_without_gpus_may_start_when_their_number_is_configured() -> None:
    config = Config(device="cuda", prefill=PrefillConfig(gpus=1), decode=DecodeConfig(gpus=1))
    share = gpus_per_rank([config], 0, joined=True)
    assert gpus_of(config, Role.PREFILL, share) == 1
    with pytest.raises(InvalidConfig, match="Ray sees no GPU"):
        gpus_per_rank([config], 0, joined=False)
    with pytest.raises(InvalidConfig, match="say how many each worker wants"):
        gpus_per_rank([Config(device="cuda")], 0, joined=True)


def test_a_worker_that_switched_restarts_with_the_gpus_it_has() -> None:
    config = Config(
        prefill=PrefillConfig(tensor_parallel=2), decode=DecodeConfig(tensor_parallel=4)
    )
    assert sized_for(config, Role.DECODE, Role.PREFILL).decode.tensor_parallel == 2
    assert sized_for(config, Role.PREFILL, Role.DECODE).prefill.tensor_parallel == 4
    assert sized_for(config, Role.DECODE, Role.DECODE) == config


NODES = [{"GPU": 2.0, "CPU": 8.0}, {"baton_decode": 1.0}]


def test_a_worker_that_fits_a_node_waits_for_a_place() -> None:
    assert describe_wait({"GPU": 2.0}, NODES) == "waiting for a place"
    assert describe_wait({}, NODES) == "waiting for a place"


def test_a_worker_that_fits_no_node_names_its_resources() -> None:
    words = describe_wait({"GPU": 2.0, "baton_decode": 1.0}, NODES)
    assert words == "waiting for a node that has GPU: 2, baton_decode: 1: none has"
