"""Draws what `baton status`, `top` and `why` show."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from baton.cli.terminal import grid
from baton.v1 import cluster_pb2, timing_pb2, worker_pb2

PAGES_WIDTH = 16
PHASES_WIDTH = 48
CHART_POINTS = 60

_BLOCKS = " ▁▂▃▄▅▆▇█"
_BOUND_COLOURS = {
    cluster_pb2.BOUND_IDLE: "green",
    cluster_pb2.BOUND_NONE: "green",
    cluster_pb2.BOUND_WORKERS: "red",
}

# The kinds of pages, in a bar's order: a colour and, for terminals without, a shade.
_PAGES = (
    ("leased", "█", "green"),
    ("quarantined", "▓", "red"),
    ("cached", "▒", "blue"),
    ("empty", "░", "dim"),
)

_ROLES = {worker_pb2.ROLE_PREFILL: "prefill", worker_pb2.ROLE_DECODE: "decode"}

# Each phase's label, and the colour of the process that works in it.
_PHASES = {
    timing_pb2.PHASE_KIND_PARSE: ("parse", "cyan"),
    timing_pb2.PHASE_KIND_TEMPLATE: ("template", "cyan"),
    timing_pb2.PHASE_KIND_TOKENIZE: ("tokenize", "cyan"),
    timing_pb2.PHASE_KIND_RESPONSE_CACHE: ("response cache", "magenta"),
    timing_pb2.PHASE_KIND_QUEUE: ("queue at the router", "yellow"),
    timing_pb2.PHASE_KIND_FETCH: ("fetch cached pages", "magenta"),
    timing_pb2.PHASE_KIND_PREFILL_WAIT: ("wait for prefill", "yellow"),
    timing_pb2.PHASE_KIND_PREFILL: ("prefill", "green"),
    timing_pb2.PHASE_KIND_RESERVE: ("reserve pages", "magenta"),
    timing_pb2.PHASE_KIND_TRANSFER: ("transfer", "magenta"),
    timing_pb2.PHASE_KIND_ADMIT: ("wait for a batch", "yellow"),
    timing_pb2.PHASE_KIND_FIRST_DECODE: ("first decode step", "blue"),
    timing_pb2.PHASE_KIND_DECODE: ("decode", "blue"),
    timing_pb2.PHASE_KIND_DETOKENIZE: ("detokenize", "cyan"),
    timing_pb2.PHASE_KIND_VERIFY: ("verify a cached answer", "magenta"),
    timing_pb2.PHASE_KIND_WRITE: ("write", "cyan"),
    timing_pb2.PHASE_KIND_RETRY: ("lost and retried", "red"),
    timing_pb2.PHASE_KIND_NETWORK: ("network, other", "dim"),
}


def _priorities(status: cluster_pb2.StatusResponse) -> str:
    """Counts the queued requests by priority; empty if all have priority 0."""
    queued = status.queued_priorities
    if all(each.priority == 0 for each in queued):
        return ""
    return f" ({', '.join(f'{each.requests} of priority {each.priority}' for each in queued)})"


def status_table(status: cluster_pb2.StatusResponse, address: str) -> RenderableType:
    """A line for the router, a row for each worker, then faults. Fits 80 columns."""
    router = Text.assemble(
        (", ".join(each.name for each in status.models) or status.model, "bold"),
        f" by {status.router_id} at {address}, up {duration(status.uptime_seconds)},"
        f" {status.active_requests} active, {status.queued_requests} queued{_priorities(status)},"
        f" {status.finished_requests} finished",
        (" (draining)" if status.draining else "", "yellow"),
    )
    numbers = ("waiting", "running", "active", "hits")
    table = grid("worker", "role", "attached", "pages", right=numbers)
    for worker in status.workers:
        table.add_row(*_worker_cells(worker, named=len(status.models) > 1))
    legend = Text(" + ").join(
        Text.assemble((shade, colour), f" {name}") for name, shade, colour in _PAGES
    )
    # JSON and metrics count them so.
    legend.append("; cached and empty pages are free")
    return Group(router, "", table, "", legend, *_faults(status), *_misfits(status))


def _worker_cells(worker: cluster_pb2.WorkerStatus, *, named: bool = False) -> list[RenderableType]:
    """`named` adds the model's name."""
    member = worker.member
    model = f"\n{member.model}" if named else ""
    # Only admins get the address.
    address = f"\n{member.address}" if member.address else ""
    weights = f"\n{worker.quantization} weights" if worker.quantization else ""
    pages = f"\n{worker.kv_dtype} pages" if worker.kv_dtype else ""
    attached = ("yes", "green") if worker.attached else ("no", "red")
    if worker.attached and worker.draining:
        attached = "draining", "yellow"
    # The cached share of the prompt tokens that it had to prefill or receive.
    hits = f"{worker.cached_tokens / worker.prompt_tokens:.0%}" if worker.prompt_tokens else "-"
    paused = f"\n{worker.load.paused} paused" if worker.load.paused else ""
    return [
        Text.assemble(member.worker_id, (model + address + weights + pages, "dim")),
        _ROLES.get(member.role, "?"),
        Text(*attached),
        _pages(worker),
        str(worker.load.waiting) + paused,
        str(worker.load.running),
        str(worker.active_requests),
        hits,
    ]


def _pages(worker: cluster_pb2.WorkerStatus) -> Text:
    """A bar, and its numbers below."""
    numbers = "+".join(str(count) for count in _counts(worker.load))
    kept = f"\n{worker.load.kept_pages} in second tier" if worker.load.kept_pages else ""
    guesses = _guesses(worker.load.accepted_tokens, worker.load.guessed_tokens)
    if worker.load.guessed_steps:
        length = 1 + worker.load.accepted_tokens / worker.load.guessed_steps
        guesses += f",\n{length:.1f} tokens a step with guesses"
    lines = f"\n{numbers} of {worker.total_pages}", kept, f"\n{guesses}" if guesses else ""
    return Text.assemble(page_bar(worker.load), *lines)


def _guesses(accepted: int, guessed: int) -> str:
    return f"{accepted} of {guessed} guesses right" if guessed else ""


def page_bar(load: worker_pb2.Load) -> Text:
    """A bar of the pool's pages by state; blank before the worker's first report."""
    counts = _counts(load)
    total = sum(counts)
    if total == 0:
        return Text(" " * PAGES_WIDTH)
    # Rounding the boundaries, not the lengths, keeps every bar equally long.
    ends = [round(PAGES_WIDTH * count / total) for count in accumulate(counts, initial=0)]
    return Text.assemble(
        *(
            (shade * (end - start), colour)
            for (_, shade, colour), (start, end) in zip(_PAGES, pairwise(ends), strict=True)
        )
    )


def _counts(load: worker_pb2.Load) -> list[int]:
    empty = load.free_pages - load.cached_pages
    return [load.leased_pages, load.quarantined_pages, load.cached_pages, empty]


def _faults(status: cluster_pb2.StatusResponse) -> list[Text]:
    faults = ((w.member.worker_id, w.fault or w.load.fault) for w in status.workers)
    return [Text(f"{name}: {fault}", style="red") for name, fault in faults if fault]


def _misfits(status: cluster_pb2.StatusResponse) -> list[Text]:
    """A line for each pair of workers with different versions or layouts."""
    return [
        Text(f"{worker.member.worker_id} and {misfit.worker_id}: {misfit.reason}", style="yellow")
        for worker in status.workers
        for misfit in worker.misfits
        if worker.member.role == worker_pb2.ROLE_PREFILL
    ]


class Overview(NamedTuple):
    """What `baton top` shows."""

    status: cluster_pb2.StatusResponse
    diagnosis: cluster_pb2.Diagnosis
    trends: cluster_pb2.TrendsResponse
    recent: Sequence[timing_pb2.RequestTiming]

    def render(self, address: str) -> RenderableType:
        colour = _BOUND_COLOURS.get(self.diagnosis.bound, "yellow")
        advice = [Text(f"  {line}", style="dim") for line in self.diagnosis.advice[:2]]
        recent: list[RenderableType] = ["", request_table(self.recent)] if self.recent else []
        return Group(
            status_table(self.status, address),
            "",
            Text(self.diagnosis.sentence, style=colour),
            *advice,
            "",
            _charts(self.trends),
            *recent,
        )


def _charts(trends: cluster_pb2.TrendsResponse) -> Table:
    points = trends.points[-CHART_POINTS:]
    each = trends.seconds_each or 1.0
    table = grid(show_header=False)
    rows: list[tuple[str, list[float], Callable[[float], str]]] = [
        ("TTFT p50", [point.ttft.p50 for point in points], time_text),
        ("ITL p50", [point.itl.p50 for point in points], time_text),
        ("tokens/s", [point.output_tokens / each for point in points], "{:,.1f}".format),
    ]
    for name, values, text in rows:
        most = max(values, default=0.0)
        latest = next((value for value in reversed(values) if value), 0.0)
        table.add_row(name, Text(sparkline(values), "blue"), text(latest), f"max {text(most)}")
    return table


def sparkline(values: Sequence[float]) -> str:
    """One character per value; blank for 0."""
    most = max(values, default=0.0)
    steps = len(_BLOCKS) - 1
    heights = (max(1, round(steps * value / most)) if value else 0 for value in values)
    return "".join(_BLOCKS[height] for height in heights)


def request_table(requests: Sequence[timing_pb2.RequestTiming]) -> Table:
    """One row for each request."""
    numbers = ("prompt", "cached", "answer", "TTFT", "total")
    table = grid("request", "age", "outcome", "workers", right=numbers)
    for request in requests:
        first = request.answers[0]
        table.add_row(
            request.request_id,
            _age(time.time() - request.arrived_at),
            request.outcome or "running",
            _workers(first),
            str(first.prompt_tokens),
            str(first.cached_tokens),
            str(sum(answer.completion_tokens for answer in request.answers)),
            time_text(request.ttft_seconds) if request.ttft_seconds else "-",
            time_text(request.end_to_end_seconds),
        )
    return table


def _workers(answer: timing_pb2.AnswerTiming) -> str:
    if answer.HasField("response_cache"):
        cache = answer.response_cache
        similar = f", similarity {cache.similarity:.4f}" if cache.HasField("similarity") else ""
        similar += ", verified" if cache.verified else ""
        return f"response cache ({cache.kind}{similar}, {duration(cache.age_seconds)} old)"
    return " → ".join(filter(None, (answer.prefill_worker, answer.decode_worker)))


def waterfall(request: timing_pb2.RequestTiming) -> RenderableType:
    """A request's time breakdown: a bar for each phase of each answer, from arrival to end."""
    ended = request.outcome or "running"
    colour = "green" if ended in ("stop", "length") else "yellow"
    first = f", first token after {time_text(request.ttft_seconds)}" if request.ttft_seconds else ""
    total = f", {time_text(request.end_to_end_seconds)} in all"
    asked = (f"{request.model} " if request.model else "", "dim")
    ending = (ended, colour)
    headline = Text.assemble((request.request_id, "bold"), " ", asked, ending, first, total)
    return Group(headline, *(_answer(answer, len(request.answers)) for answer in request.answers))


def _answer(answer: timing_pb2.AnswerTiming, answers: int) -> RenderableType:
    table = grid(show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(width=PHASES_WIDTH, no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="fold")
    for phase in answer.phases:
        table.add_row(*_phase_cells(phase, answer.end_to_end_seconds))
    return Group("", _placement(answer, answers), "", table, "", *_sums(answer))


def _placement(answer: timing_pb2.AnswerTiming, answers: int) -> Text:
    name = f"answer {answer.index}: " if answers > 1 else ""
    cached = f" ({answer.cached_tokens} cached)" if answer.cached_tokens else ""
    again = f", {answer.attempts} attempts" if answer.attempts > 1 else ""
    guessed = answer.accepted_tokens + answer.rejected_tokens
    guesses = f" ({_guesses(answer.accepted_tokens, guessed)})" if guessed else ""
    why = f" ({answer.policy}, {answer.reason_code})" if answer.policy else ""
    since = f"\nretried because: {answer.retry_reason}" if answer.retry_reason else ""
    return Text(
        f"{name}{_workers(answer) or 'nowhere'}{why}{again}; {answer.prompt_tokens} prompt"
        f" tokens{cached}, {answer.completion_tokens} answered{guesses}{since}{_refusal(answer)}"
    )


def _refusal(answer: timing_pb2.AnswerTiming) -> str:
    if not answer.HasField("refused_hit"):
        return ""
    hit = answer.refused_hit
    why = "the model denied" if hit.denied else "the model did not confirm in time"
    return (
        f"\na cached answer to a question of similarity {hit.similarity:.4f} was refused: {why}"
        f" that both ask the same ({time_text(hit.seconds)})"
    )


def _phase_cells(phase: timing_pb2.Phase, total: float) -> list[RenderableType]:
    name, colour = _PHASES.get(phase.kind, ("?", "white"))
    share = phase.seconds / total if total else 0.0
    return [
        Text(f"{name}, hidden" if phase.hidden else name, style="dim" if phase.hidden else ""),
        _phase_bar(phase, total, colour),
        time_text(phase.seconds),
        Text("hidden" if phase.hidden else f"{share:.1%}", style="dim"),
        Text(phase.worker, style="dim"),
    ]


def _phase_bar(phase: timing_pb2.Phase, total: float, colour: str) -> Text:
    """At least one character wide, never beyond the end."""
    scale = PHASES_WIDTH / total if total else 0.0
    start = min(int(phase.start_seconds * scale), PHASES_WIDTH - 1)
    end = min(max(round((phase.start_seconds + phase.seconds) * scale), start + 1), PHASES_WIDTH)
    return Text.assemble(" " * start, (("░" if phase.hidden else "█") * (end - start), colour))


def _sums(answer: timing_pb2.AnswerTiming) -> list[Text]:
    parts = sum(phase.seconds for phase in answer.phases if not phase.hidden)
    text = f"the parts sum to {time_text(parts)} of {time_text(answer.end_to_end_seconds)}"
    if answer.completion_tokens > 1:
        each = (answer.end_to_end_seconds - answer.ttft_seconds) / (answer.completion_tokens - 1)
        longest = time_text(answer.longest_gap_seconds)
        text += f"; {time_text(each)} a token after the first, at most {longest}"
    if answer.transferred_bytes:
        text += f"; {answer.transferred_bytes / 2**20:.1f} MiB moved"
    lines = [text]
    if len(answer.chunks) > 1:
        chunks = (f"{each.tokens} in {time_text(each.seconds)}" for each in answer.chunks)
        lines.append(f"prefill's chunks: {', '.join(chunks)}")
    return [Text(line, style="dim") for line in lines]


def time_text(seconds: float) -> str:
    """A time in microseconds, milliseconds or seconds."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} µs"
    if seconds < 1.0:
        return f"{seconds * 1e3:.1f} ms"
    return f"{seconds:.2f} s"


def _age(seconds: float) -> str:
    return f"{max(seconds, 0.0):.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def duration(seconds: float) -> str:
    """As in 42 s, 3 min, 5 h 12 min, 2 d 3 h."""
    minutes, hours, days = int(seconds // 60), int(seconds // 3600), int(seconds // 86400)
    if minutes == 0:
        return f"{int(seconds)} s"
    if hours == 0:
        return f"{minutes} min"
    if days == 0:
        return f"{hours} h {minutes % 60} min"
    return f"{days} d {hours % 24} h"
