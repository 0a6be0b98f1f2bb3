"""The commands that change workers, and what is planned of them, against a real gRPC server."""

from __future__ import annotations

import json

import pytest
from command_line import run
from scripted_router import ScriptedRouter, pools

from baton.cli.fleet_commands import is_back
from baton.core.errors import Unavailable
from baton.v1 import cluster_pb2, worker_pb2


def test_drain_waits_until_the_worker_is_gone(router: ScriptedRouter) -> None:
    ended = run(router, "drain", "decode-0", "--last")
    assert ended.stdout == "decode-0 is drained\n"
    assert router.drained == ["decode-0"]


def test_drain_refuses_the_only_worker_of_a_pool_without_last(router: ScriptedRouter) -> None:
    ended = run(router, "drain", "decode-0")
    assert (ended.exit_code, router.drained) == (1, [])
    assert "decode-0 is the only worker of its pool" in ended.stderr


def test_restart_takes_a_prefill_and_a_decode_worker_by_turns(router: ScriptedRouter) -> None:
    for worker in list(router.status.workers):
        added = router.status.workers.add()
        added.CopyFrom(worker)
        added.member.worker_id = worker.member.worker_id.replace("0", "1")
    router.status.workers[2].connected.append("decode-1")
    ended = run(router, "restart")
    assert ended.exit_code == 0, ended.stderr
    assert router.drained == ["prefill-0", "decode-0", "prefill-1", "decode-1"]
    assert [line.split()[:3] for line in ended.stdout.splitlines()] == [
        [name, "is", "back"] for name in router.drained
    ]


def test_restart_refuses_the_only_worker_of_a_pool_without_last(router: ScriptedRouter) -> None:
    ended = run(router, "restart", "decode-0")
    assert (ended.exit_code, router.drained) == (1, [])
    assert "decode-0 is the only worker of its pool" in ended.stderr
    assert run(router, "restart", "decode-0", "--last").exit_code == 0
    assert router.drained == ["decode-0"]


def test_restart_prints_json(router: ScriptedRouter) -> None:
    ended = run(router, "restart", "decode-0", "prefill-0", "--last", "--json")
    lines = [json.loads(line) for line in ended.stdout.splitlines()]
    assert [line["worker"] for line in lines] == ["decode-0", "prefill-0"]
    assert all(line["seconds"] > 0 for line in lines)


def test_restart_names_a_worker_that_is_not_there(router: ScriptedRouter) -> None:
    ended = run(router, "restart", "nobody")
    assert (ended.exit_code, router.drained) == (1, [])
    assert "no worker called 'nobody'" in ended.stderr


def test_restart_fails_when_a_worker_does_not_come_back(router: ScriptedRouter) -> None:
    router.status.workers[1].load.Clear()
    ended = run(router, "restart", "decode-0", "--last", "--wait", "0.1")
    assert ended.exit_code == 1
    assert "decode-0 is not back yet" in ended.stderr


def test_restart_ends_at_a_worker_that_cannot_start_again(router: ScriptedRouter) -> None:
    router.status.workers[0].load.Clear()
    failed = pools(prefill_0="failed")
    failed.workers[0].error = "there is no model at /models"
    router.pools = [failed]
    ended = run(router, "restart", "prefill-0", "decode-0", "--last")
    assert (ended.exit_code, router.drained) == (1, ["prefill-0"])
    assert "prefill-0 cannot start again" in ended.stderr
    assert "there is no model at /models" in ended.stderr


def test_a_worker_is_back_once_pages_pass_or_it_fits_nobody(router: ScriptedRouter) -> None:
    prefill, decode = router.status.workers
    prefill.incarnation = decode.incarnation = 2
    assert is_back([prefill, decode], "decode-0", 1)
    prefill.connected.pop()
    assert not is_back([prefill, decode], "decode-0", 1)
    prefill.misfits.add(worker_id="decode-0", reason="page_size is 16 here and 32 there")
    decode.misfits.add(worker_id="prefill-0", reason="page_size is 16 here and 32 there")
    prefill.fault = "page_size is 16 here and 32 there"
    assert is_back([prefill, decode], "decode-0", 1)
    assert is_back([prefill, decode], "prefill-0", 1)
    assert not is_back([prefill, decode], "prefill-0", 2)


def test_scale_waits_until_the_pools_are_as_wanted(router: ScriptedRouter) -> None:
    router.pools = [
        pools(prefill_0="ready", decode_0="ready", decode_1="loading the model"),
        pools(prefill_0="ready", decode_0="ready", decode_1="ready"),
    ]
    ended = run(router, "scale", "--decode", "2")
    assert ended.stdout == "1 prefill and 2 decode workers serve\n"
    assert ended.stderr.split() == ["decode-1", "loading", "the", "model", "decode-1", "ready"]
    assert router.scaled == [(0, 2)]


def test_scale_keeps_waiting_while_the_controller_is_away(router: ScriptedRouter) -> None:
    router.pools = [
        pools(prefill_0="ready", decode_0="ready", decode_1="starting"),
        pools(prefill_0="ready", decode_0="ready", decode_1="starting"),
        Unavailable("the controller is away"),
        pools(prefill_0="ready", decode_0="ready", decode_1="ready"),
    ]
    ended = run(router, "scale", "--decode", "2")
    assert ended.stdout == "1 prefill and 2 decode workers serve\n"
    assert "the controller is away" in ended.stderr


def test_scale_waits_for_workers_that_drain(router: ScriptedRouter) -> None:
    router.pools = [
        pools(prefill_0="ready", prefill_1="draining", decode_0="ready", decode_1="ready"),
        pools(prefill_0="ready", decode_0="ready", decode_1="ready"),
    ]
    ended = run(router, "scale", "--prefill", "1", "--json")
    lines = [json.loads(line) for line in ended.stdout.splitlines()]
    assert [len(line["workers"]) for line in lines] == [4, 3]
    assert lines[0]["workers"][1]["retiring"]
    assert lines[0]["workers"][1]["role"] == "prefill"


def test_scale_need_not_wait(router: ScriptedRouter) -> None:
    router.pools = [pools(prefill_0="ready", decode_0="ready", decode_1="starting")]
    ended = run(router, "scale", "--decode", "2", "--no-wait")
    assert ended.stdout == "1 prefill and 2 decode workers are wanted\n"


def test_scale_names_late_workers(router: ScriptedRouter) -> None:
    router.pools = [pools(prefill_0="ready", decode_0="starting")]
    ended = run(router, "scale", "--decode", "2", "--timeout", "0")
    assert ended.exit_code == 1
    assert "not yet as wanted: decode-0 (starting)" in ended.stderr


def test_scale_fails_when_another_change_comes_after_it(router: ScriptedRouter) -> None:
    router.pools = [
        pools(wanted=(1, 1), prefill_0="ready", decode_0="ready", decode_1="draining"),
        pools(wanted=(1, 2), prefill_0="ready", decode_0="ready", decode_1="ready"),
    ]
    ended = run(router, "scale", "--decode", "1")
    assert (ended.exit_code, ended.stdout) == (1, "")
    assert ended.stderr.splitlines()[-1] == (
        "baton: another change came after this one: 1 prefill and 2 decode workers are wanted"
    )


def test_scale_fails_when_the_model_is_removed(router: ScriptedRouter) -> None:
    router.pools = [pools(prefill_0="ready", decode_0="starting"), pools(model="other")]
    ended = run(router, "scale", "--decode", "2")
    assert (ended.exit_code, ended.stdout) == (1, "")
    assert ended.stderr.splitlines()[-1] == "baton: tale was removed meanwhile"


def test_a_model_is_added_once_its_workers_serve(router: ScriptedRouter) -> None:
    router.pools = [
        pools(),
        pools(prefill_0="ready", decode_0="starting"),
        pools(prefill_0="ready", decode_0="ready"),
    ]
    ended = run(router, "model", "add", "tale", "org/tale")
    assert (ended.exit_code, ended.stdout) == (0, "tale is served\n")
    assert len(router.pools) == 1


@pytest.mark.parametrize("left", [pools(removed=True), pools(model="other", prefill_0="ready")])
def test_a_model_that_is_removed_while_it_starts_is_not_added(
    router: ScriptedRouter, left: cluster_pb2.PoolsResponse
) -> None:
    router.pools = [pools(prefill_0="starting"), left]
    ended = run(router, "model", "add", "tale", "org/tale")
    assert (ended.exit_code, ended.stdout) == (1, "")
    assert ended.stderr.splitlines()[-1] == "baton: tale was removed meanwhile"


@pytest.mark.parametrize("flags", [[], ["--decode", "0"]])
def test_scale_wants_a_number_above_0(router: ScriptedRouter, flags: list[str]) -> None:
    assert run(router, "scale", *flags).exit_code == 2
    assert router.scaled == []


def test_role_prints_the_time_of_the_switch_after_the_drain(router: ScriptedRouter) -> None:
    told = run(router, "role", "decode-0", "prefill").stdout
    assert told == "decode-0 is a prefill worker: drained in 1.50 s, ready 0.062 s later\n"
    fields = json.loads(run(router, "role", "decode-0", "prefill", "--json").stdout)
    assert fields["switch_seconds"] == 0.0625
    assert router.switched == [("decode-0", worker_pb2.ROLE_PREFILL)] * 2


def test_drain_prints_json(router: ScriptedRouter) -> None:
    told = json.loads(run(router, "drain", "decode-0", "--last", "--json").stdout)
    assert told == {"worker": "decode-0", "drained": True}


def test_plan_shows_the_decisions_and_their_reasons(router: ScriptedRouter) -> None:
    router.plan.enabled = router.plan.acts = True
    router.plan.ttft, router.plan.itl, router.plan.most_workers = 2.0, 0.05, 4
    router.plan.least_prefill, router.plan.least_decode = 1, 2
    router.plan.last.summary = "no change"
    made = router.plan.changes.add(summary="switch 1 from decode to prefill", have_prefill=1)
    made.reasons.append("decode can spare 1")
    lines = run(router, "plan").stdout.splitlines()
    assert lines[0] == (
        "the planner changes the pools: first token within 2 s, 50 ms between tokens, at least"
        " 1 + 2 workers, at most 4"
    )
    assert lines[1].split() == ["now", "no", "change", "(0", "+", "0", "workers)"]
    assert "switch 1 from decode to prefill  (1 + 0 workers)" in lines[2]
    assert lines[3].strip() == "decode can spare 1"
    told = json.loads(run(router, "plan", "--json").stdout)
    assert told["changes"][0]["reasons"] == ["decode can spare 1"]


def test_plan_names_workers_that_do_not_serve_yet(router: ScriptedRouter) -> None:
    router.plan.enabled = True
    router.plan.last.summary = "no change"
    router.pools = [pools(prefill_0="ready", decode_0="ready", decode_1="waiting for a place")]
    lines = run(router, "plan").stdout.splitlines()
    assert [line.strip() for line in lines[2:]] == ["decode-1: waiting for a place"]


def test_plan_reports_a_missing_planner(router: ScriptedRouter) -> None:
    assert "no planner runs here" in run(router, "plan").stdout
