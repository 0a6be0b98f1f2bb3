from __future__ import annotations

import dataclasses
import json
import math
import random
from pathlib import Path

import pytest
from typer.testing import CliRunner

from baton.cli.app import app
from baton.core.errors import InvalidConfig
from baton.core.types import Role
from baton.planner.profile import H200_8B, Profile, load_profile, weight
from baton.planner.simulation_report import SimulationReport
from baton.planner.simulator import Setup, Simulator
from baton.planner.sizing import ONE_EACH, Goals, Pools
from baton.planner.trace import BLOCK, TraceRequest, Traffic, arrivals, read_trace

GOALS = Goals(ttft=4.0, itl=0.05, most_workers=60)
# Nothing but a millisecond a token, ten a step, one a request in it.
PLAIN = Profile(
    prefill=(0.0, 1e-3, 0.0, 1e-3),
    transfer=(0.0, 0.0),
    step=(1e-2, 1e-3, 0.0, 0.0),
    exposed=(0.0, 1.0),
)


def simulate(
    requests: list[TraceRequest],
    workers: Pools = ONE_EACH,
    profile: Profile = PLAIN,
    goals: Goals = GOALS,
    plans: bool = False,
) -> SimulationReport:
    return Simulator(Setup(workers, profile, goals, plans)).run(requests)


def arrival(seconds: float, prompt: int = 512, answer: int = 11, first: int = 0) -> TraceRequest:
    return TraceRequest(seconds, prompt, answer, tuple(range(first, first - (-prompt // BLOCK))))


def chat_trace(seconds: float, rate: float, seed: int = 0) -> list[TraceRequest]:
    """Sessions of a few turns whose prompts go on, of lengths as in public traces of chats."""
    source = random.Random(seed)
    trace, now, block = [], 0.0, 1
    while now < seconds:
        now += source.expovariate(rate / 3)
        length, at, blocks = int(source.lognormvariate(8.5, 0.9)), now, [0]
        for _ in range(source.randint(1, 5)):
            length = min(length + source.randint(50, 1500), 60_000)
            fresh = -(-length // BLOCK) - len(blocks)
            blocks += range(block, block + fresh)
            block += fresh
            answer = min(2000, 1 + int(source.lognormvariate(5.4, 0.8)))
            trace.append(TraceRequest(at, length, answer, tuple(blocks[: -(-length // BLOCK)])))
            at += source.uniform(5.0, 60.0)
    return sorted((each for each in trace if each.seconds < seconds), key=lambda each: each.seconds)


def test_a_request_alone_takes_what_its_parts_cost() -> None:
    profile = dataclasses.replace(
        PLAIN, transfer=(0.0, 1e-6), page_bytes=32_000, exposed=(0.0, 1.0), overhead_seconds=0.1
    )
    report = simulate([arrival(0.0)], profile=profile)
    assert report.ttft.mean == pytest.approx(0.1 + 0.512)
    # 32 pages take 1.024 s to travel, of which half a second hides behind the compute.
    gaps = 10 * 0.011 + (1.024 - 0.512)
    assert report.itl.mean == pytest.approx(gaps / 10)


def test_prompts_wait_for_each_other_on_one_prefill_worker() -> None:
    report = simulate([arrival(0.0), arrival(0.1, first=50)])
    assert report.ttft.mean == pytest.approx((0.512 + 0.924) / 2)


def test_prompts_that_fit_one_step_are_computed_together() -> None:
    profile = dataclasses.replace(PLAIN, chunk_tokens=600)
    requests = [arrival(0.0), arrival(0.1, 200, first=50), arrival(0.2, 300, first=90)]
    # The second step has all of the second prompt and of the third.
    assert simulate(requests, profile=profile).ttft.mean == pytest.approx(
        (0.512 + (1.012 - 0.1) + (1.012 - 0.2)) / 3
    )


def test_busy_prefill_workers_slow_each_other_down_where_they_crowd() -> None:
    crowded = dataclasses.replace(PLAIN, crowding=0.25)
    requests = [
        arrival(0.0, 400, 1),
        arrival(0.1, 400, 1, first=50),
        arrival(5.0, 400, 1, first=90),
    ]
    report = simulate(requests, Pools(2, 1), crowded)
    assert report.ttft.mean == pytest.approx((0.4 + 0.5 + 0.4) / 3)


def test_a_long_prompt_lets_those_behind_it_into_its_last_step() -> None:
    profile = dataclasses.replace(PLAIN, chunk_tokens=600)
    report = simulate([arrival(0.0, 1000), arrival(0.1, 100, first=50)], profile=profile)
    assert report.ttft.mean == pytest.approx((1.1 + 1.0) / 2)


def test_what_was_computed_before_is_not_computed_again() -> None:
    report = simulate([arrival(0.0, 1024), arrival(5.0, 1536)])
    assert report.hit_rate == pytest.approx(1024 / 2560)
    assert report.ttft.mean == pytest.approx((1.024 + 0.512) / 2)


def test_an_answer_of_one_token_needs_no_decode_worker() -> None:
    report = simulate([arrival(0.0, answer=1)])
    assert report.decode.busy == 0.0
    assert report.kept == 1.0


def step_by_step(joins: list[tuple[float, int]]) -> list[float]:
    """When each of some answers ends on one worker, simulated token by token: (the second it
    comes, its steps) each."""
    waiting, running, ends = list(enumerate(joins)), {}, [0.0] * len(joins)
    now = 0.0
    while waiting or running:
        if not running:
            now = max(now, waiting[0][1][0])
        while waiting and waiting[0][1][0] <= now + 1e-9:
            index, (_, steps) = waiting.pop(0)
            running[index] = steps
        now += 1e-2 + 1e-3 * len(running)
        for index in list(running):
            running[index] -= 1
            if not running[index]:
                del running[index]
                ends[index] = now
    return ends


def test_batches_end_when_a_simulation_of_every_step_says() -> None:
    source = random.Random(5)
    # Prompts of one token: what comes first is answered first.
    requests, at = [], 0.0
    for index in range(60):
        at += source.expovariate(8.0)
        requests.append(arrival(at, 1, source.randint(2, 60), first=index))
    report = simulate(requests)
    joins = [(each.seconds + 1e-3, each.answer_tokens - 1) for each in requests]
    ends = step_by_step(joins)
    gaps = sum(steps for _, steps in joins)
    exact = sum(end - join for end, (join, _) in zip(ends, joins, strict=True)) / gaps
    assert report.itl.mean == pytest.approx(exact, rel=1e-3)


def test_a_request_waits_for_the_step_that_is_under_way() -> None:
    requests = [arrival(0.0, 1, 100), arrival(0.0151, 1, 2, first=9)]
    # The first steps from 1 ms on, 11 ms each; the second's token #1 is there at 16.1 ms, its
    # other one after the step of both that begins at 23 ms.
    assert simulate(requests).itl.mean == pytest.approx((98 * 0.011 + 0.012 + 0.0189) / 100)


def test_pages_of_prompts_that_are_computed_together_come_one_after_the_other() -> None:
    profile = dataclasses.replace(PLAIN, exposed=(0.004, 1.0), step=(1e-2, 0.0, 0.0, 0.0))
    requests = [arrival(0.0, 1000, 1), *(arrival(0.1, 9, 2, first=n) for n in (50, 60))]
    # The second comes while the first steps.
    assert simulate(requests, profile=profile).itl.mean == pytest.approx((0.014 + 0.024) / 2)


def test_busy_prefill_workers_slow_down_steps_on_shared_hardware() -> None:
    shared = dataclasses.replace(PLAIN, step=(1e-2, 1e-3, 0.0, 2e-2))
    requests = [arrival(0.0, answer=200), arrival(0.6, 4096, first=50)]
    assert simulate(requests, profile=shared).itl.p99 > 0.03
    assert simulate(requests).itl.p99 < 0.03


def test_a_step_stands_still_while_prefill_workers_have_all_cores() -> None:
    shared = dataclasses.replace(PLAIN, shared_cores=2, decode_weight=weight(19))
    writing = arrival(0.0, 1, 200)
    reading = [arrival(0.6, 1000, 1, first=50), arrival(0.6, 1000, 1, first=90)]
    both = simulate([writing, *reading], Pools(2, 1), shared)
    one = simulate([writing, reading[0]], Pools(2, 1), shared)
    # One gap of 199 is as long as the prompts take, all others are as long as ever.
    assert one.itl.mean == pytest.approx(0.011)
    assert both.itl.mean == pytest.approx((199 * 0.011 + 0.98) / 199, rel=0.01)
    assert both.itl.p90 == pytest.approx(0.011, rel=0.02)


def test_requests_wait_in_line_where_decode_has_no_pages_left() -> None:
    small = dataclasses.replace(PLAIN, decode_pages=40)
    requests = [arrival(0.01 * index, 512, 50, first=100 * index) for index in range(30)]
    report = simulate(requests, Pools(8, 1), small)
    assert report.requests == 30
    assert report.most_queued > 0
    assert report.mean_batch == pytest.approx(1.0)


def test_slices_with_a_window_hold_no_more_than_that() -> None:
    """Prompts of 512 tokens and answers of 50: 36 pages a slice, or 4 in a window of 64."""
    sliced = dataclasses.replace(PLAIN, decode_pages=100, windows=(0, 64, 64))
    requests = [arrival(0.01 * index, 512, 50, first=100 * index) for index in range(30)]
    batches = {
        profile.windows: simulate(requests, Pools(8, 1), profile).mean_batch
        for profile in (sliced, dataclasses.replace(sliced, windows=(0, 0, 0)))
    }
    assert batches[0, 0, 0] == pytest.approx(1.0)
    assert 1.0 < batches[0, 64, 64] <= 2.0


def test_a_windows_pages_are_those_that_the_router_counts() -> None:
    profile = dataclasses.replace(PLAIN, windows=(0, 64, 64))
    assert [profile.pages_held(tokens) for tokens in (16, 64, 512)] == [3.0, 12.0, 40.0]
    simulator = Simulator(Setup(ONE_EACH, profile, GOALS))
    assert simulator.snapshot(arrival(0.0)).windows == (None, 64, 64)


def test_few_and_many_workers_answer_every_request() -> None:
    trace = chat_trace(60.0, 20.0)
    for workers in (Pools(2, 3), Pools(8, 24)):
        report = simulate(list(arrivals(trace, Traffic())), workers, H200_8B)
        assert report.requests == len(trace)


def test_the_planner_keeps_the_objectives_while_the_load_doubles_and_halves() -> None:
    trace = chat_trace(1500.0, 4.0)
    traffic = Traffic(seconds=2400.0, loads=(1.0, 2.0, 1.0, 0.5))
    played = list(arrivals(trace, traffic))
    goals = dataclasses.replace(GOALS, least=Pools(2, 1))
    report = simulate(played, Pools(2, 1), H200_8B, goals, plans=True)
    assert report.requests == len(played)
    assert report.kept >= 0.95
    added = sum(each.decision.add.total for each in report.decisions)
    drained = sum(each.decision.drain.total for each in report.decisions)
    assert added > 0
    assert drained > 0
    assert len(report.decisions) < 30


def test_workers_change_their_role_when_the_traffic_does() -> None:
    reading = [arrival(0.5 * index, 6144, 20, first=100 * index) for index in range(400)]
    writing = [
        arrival(200 + 0.5 * index, 600, 600, first=10**6 + 100 * index) for index in range(400)
    ]
    profile = dataclasses.replace(H200_8B, prefill=(0.0, 3e-4, 0.0, 3e-4), max_batch=4)
    goals = dataclasses.replace(GOALS, most_workers=10)
    report = simulate(reading + writing, Pools(8, 2), profile, goals, plans=True)
    switches = [each.decision.switch for each in report.decisions if each.decision.switch]
    assert any(switch.to is Role.DECODE for switch in switches)
    assert report.requests == 800


def test_traffic_is_as_dense_as_its_parts_say() -> None:
    trace = [TraceRequest(float(at), 512, 2, (at,)) for at in range(100)]
    played = list(arrivals(trace, Traffic(seconds=100.0, loads=(1.0, 2.0))))
    assert sum(each.seconds < 50 for each in played) == 50
    assert sum(each.seconds >= 50 for each in played) == 100
    assert played[-1].seconds < 100


def test_copies_and_repeats_of_a_trace_share_only_what_all_of_it_shares() -> None:
    trace = [TraceRequest(float(at), 1024, 2, (0, at + 1)) for at in range(4)]
    played = list(arrivals(trace, Traffic(seconds=8.0, copies=2)))
    assert {each.blocks[0] for each in played} == {0}
    assert len({each.blocks[1] for each in played}) == len(played) == 16
    assert [each.seconds for each in played] == sorted(each.seconds for each in played)


def test_a_profile_is_the_same_after_it_was_saved(tmp_path: Path) -> None:
    H200_8B.save(tmp_path / "profile.json")
    assert load_profile(tmp_path / "profile.json") == H200_8B


@pytest.mark.parametrize(
    "text", ["", "[]", '{"speed": 1}', '{"prefill": [1, 2]}', '{"step": [1, 2, 3, "4"]}']
)
def test_what_is_no_profile_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "profile.json").write_text(text)
    with pytest.raises(InvalidConfig):
        load_profile(tmp_path / "profile.json")


def test_the_command_prints_the_report_and_the_plan(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(_line(each) for each in chat_trace(60.0, 4.0)))
    command = ["simulate", str(path), "--plan", "--minutes", "3", "--load", "1,4"]
    found = CliRunner().invoke(app, command)
    assert found.exit_code == 0, found.output
    assert "goodput" in found.output
    assert "prompts/s of" in found.output
    told = json.loads(CliRunner().invoke(app, [*command, "--json"]).output)
    assert math.isfinite(told["ttft"]["p99"])


def test_models_of_one_trace_have_their_own_workers(tmp_path: Path) -> None:
    """Each does what it does alone with the same arrivals."""
    both = [
        each._replace(model="b" if place % 3 else "a")
        for place, each in enumerate(chat_trace(60.0, 4.0))
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(_line(each) for each in both))
    fleets = {"a": Pools(1, 1), "b": Pools(2, 1)}
    flags = [f"--model={name}={size.prefill}+{size.decode}" for name, size in fleets.items()]
    found = CliRunner().invoke(app, ["simulate", str(path), *flags, "--json"])
    assert found.exit_code == 0, found.output
    told = json.loads(found.output)["models"]
    for name, workers in fleets.items():
        own = [each for each in arrivals(read_trace(path), Traffic()) if each.model == name]
        alone = Simulator(Setup(workers, H200_8B, Goals(4.0, 0.05, 2 * workers.total))).run(own)
        assert told[name] == json.loads(json.dumps(dataclasses.asdict(alone)))
    lines = CliRunner().invoke(app, ["simulate", str(path), *flags]).output.splitlines()
    assert [line for line in lines if line in fleets] == ["a", "b"]


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ([], "the trace has requests to a, but workers are given for no model by name"),
        (["--model=a=1+1", "--model=b=1+1"], "workers are given for a, b"),
        (["--model=a=0+1"], "must be as in name=2+4"),
    ],
)
def test_the_command_refuses_models_that_do_not_fit_the_trace(
    tmp_path: Path, flags: list[str], reason: str
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(_line(TraceRequest(0.0, 512, 2, (0,), "a")))
    found = CliRunner().invoke(app, ["simulate", str(path), *flags])
    assert found.exit_code == 1
    assert reason in " ".join(found.output.split())


def test_the_command_refuses_what_is_no_trace(tmp_path: Path) -> None:
    (tmp_path / "trace.jsonl").write_text("{}")
    found = CliRunner().invoke(app, ["simulate", str(tmp_path / "trace.jsonl")])
    assert found.exit_code == 1


def _line(request: TraceRequest) -> str:
    return json.dumps(
        {
            "timestamp": 1e3 * request.seconds,
            "input_length": request.prompt_tokens,
            "output_length": request.answer_tokens,
            "hash_ids": request.blocks,
            "model": request.model,
        }
    )
