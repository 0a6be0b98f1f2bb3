"""What a decode worker on a GPU decides about a draft model, by a simulation with the costs that an
H200 has with models of 8B and 1B. Times are the simulation's, and the same on any machine."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from simulated_gpu import VOCABULARY, SimulatedEngine, SimulatedGpu, as_engine, works
from speculating import Loop

from baton.core.online_fit import OnlineFit
from baton.core.types import Work
from baton.decode_worker import drafts as drafts_module
from baton.decode_worker.draft_pricing import ENOUGH, GPU_SECONDS, Pricing
from baton.decode_worker.drafts import Drafts
from baton.decode_worker.speculation import Speculation
from baton.decode_worker.step_cost import StepCost
from baton.worker import step_pipeline

PROMPT, ANSWER, RUNS = 512, 160, 3


class Worker:
    """A main model and a draft on one GPU. What they cost is kept from run to run."""

    def __init__(self, right: float, host: float, patch: pytest.MonkeyPatch) -> None:
        """`right` is the share of right guesses, and `host` the seconds of a launch."""
        self.gpu = SimulatedGpu()
        for module in (drafts_module, step_pipeline):
            patch.setattr(module, "time", SimpleNamespace(monotonic=self.gpu.monotonic))
        main = SimulatedEngine(
            self.gpu, lambda count, rows: host + 1e-5 * count, lambda _, rows: 4.3e-3 + 26e-6 * rows
        )
        draft = SimulatedEngine(
            self.gpu,
            lambda count, rows: host + 1e-5 * count,
            lambda count, rows: 1.1e-3 + 1e-5 * count + 4e-6 * rows,
            right,
        )
        self.main, self.drafts = as_engine(main), Drafts(as_engine(draft), VOCABULARY, 8192)
        self._cost = StepCost(runs_ahead=True)

    def seconds(self, asked: list[Work], *, drafting: bool) -> tuple[float, Loop]:
        """Of all answers."""
        speculation = Speculation(self.drafts, self._cost, runs_ahead=True) if drafting else None
        loop = Loop(self.main, speculation, max_batch=256, chunk_tokens=8192)
        began = self.gpu.now
        loop.answer(asked)
        return self.gpu.now - began, loop


@pytest.mark.parametrize(("streams", "host"), [(1, 1e-3), (8, 1e-3), (32, 2e-4)])
def test_a_right_draft_guesses_for_all_streams(
    streams: int, host: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, asked = Worker(0.8, host, monkeypatch), works(streams, PROMPT, 2 * ANSWER)
    worker.drafts.rehearse()
    plain, _ = worker.seconds(asked, drafting=False)
    for _ in range(RUNS):
        seconds, loop = worker.seconds(asked, drafting=True)
    assert loop.accepted > streams * ANSWER
    assert seconds < plain


@pytest.mark.parametrize("streams", [1, 8, 32])
@pytest.mark.parametrize("right", [0.0, 0.4])
def test_a_wrong_draft_costs_little_and_is_tried_again(
    streams: int, right: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, asked = Worker(right, 1e-3, monkeypatch), works(streams, PROMPT, ANSWER)
    worker.drafts.rehearse()
    plain, _ = worker.seconds(asked, drafting=False)
    taken = [worker.seconds(asked, drafting=True)[0] for _ in range(RUNS)]
    assert max(taken[1:]) < plain / 0.97
    compared = worker.drafts.compared

    def is_tried() -> bool:
        worker.seconds(asked, drafting=True)
        return worker.drafts.compared > compared

    assert any(is_tried() for _ in range(RUNS))


def test_a_rehearsal_finds_what_rounds_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker(0.8, 5e-4, monkeypatch)
    worker.drafts.rehearse()
    begun, step, row, token = worker.drafts.pricing._cost.coefficients
    assert begun + step == pytest.approx(1.6e-3, rel=0.3)
    assert step == pytest.approx(1.1e-3, rel=0.3)
    assert row < 5e-5
    assert token == pytest.approx(4e-6, rel=0.5)
    assert not worker.drafts.check(), "all pages came back"
    assert worker.drafts.seconds == worker.drafts.compared == 0


def test_prompts_are_computed_on_credit_where_the_share_of_right_guesses_is_known() -> None:
    pricing = Pricing(OnlineFit(GPU_SECONDS, 200.0))
    loop = Loop(as_engine(SimulatedEngine(SimulatedGpu(), lambda *_: 0.0, lambda *_: 0.0)))
    prompts = {loop._begin(work): 4000 for work in works(8, 4000, 1000)}
    few = pricing.choose_prompts(prompts, 0.4, 1e-3)
    assert 0 < len(few) < len(prompts), "as many as the account has seconds for"
    assert not pricing.choose_prompts(prompts, 0.01, 1e-3), "that save less than they cost"
    pricing.note_guesses(ENOUGH, 0.0)
    assert pricing.choose_prompts(prompts, 0.4, 1e-3) == list(prompts)
    pricing.pay(1.0)
    assert not pricing.can_invest
