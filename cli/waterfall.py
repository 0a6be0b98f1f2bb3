"""Draws a request's time breakdown: a bar for each phase, from arrival to end."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from baton.v1 import timing_pb2 as pb

BAR_WIDTH = 48

# Each kind's name, and a colour for the process at work.
_KINDS = {
    pb.PHASE_KIND_PARSE: ("parse", "cyan"),
    pb.PHASE_KIND_TEMPLATE: ("template", "cyan"),
    pb.PHASE_KIND_TOKENIZE: ("tokenize", "cyan"),
    pb.PHASE_KIND_QUEUE: ("queue at the router", "yellow"),
    pb.PHASE_KIND_FETCH: ("fetch cached pages", "magenta"),
    pb.PHASE_KIND_PREFILL_WAIT: ("wait for prefill", "yellow"),
    pb.PHASE_KIND_PREFILL: ("prefill", "green"),
    pb.PHASE_KIND_RESERVE: ("reserve pages", "magenta"),
    pb.PHASE_KIND_TRANSFER: ("transfer", "magenta"),
    pb.PHASE_KIND_ADMIT: ("wait for a batch", "yellow"),
    pb.PHASE_KIND_FIRST_DECODE: ("first decode step", "blue"),
    pb.PHASE_KIND_DECODE: ("decode", "blue"),
    pb.PHASE_KIND_DETOKENIZE: ("detokenize", "cyan"),
    pb.PHASE_KIND_WRITE: ("write", "cyan"),
    pb.PHASE_KIND_RETRY: ("lost and retried", "red"),
    pb.PHASE_KIND_NETWORK: ("network, other", "dim"),
}


def waterfall(request: pb.RequestTiming) -> RenderableType:
    """Answer by answer."""
    drawn = [_answer(answer, len(request.answers)) for answer in request.answers]
    return Group(_headline(request), *drawn)


def request_table(requests: Sequence[pb.RequestTiming]) -> Table:
    """One row for each request."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("request", overflow="fold")
    for name in ("age", "outcome", "workers"):
        table.add_column(name)
    for name in ("prompt", "cached", "answer", "TTFT", "total"):
        table.add_column(name, justify="right")
    now = time.time()
    for request in requests:
        table.add_row(request.request_id, _age(now - request.arrived_at), *_cells(request))
    return table


def _cells(request: pb.RequestTiming) -> list[str]:
    answers = request.answers
    first = answers[0]
    return [
        request.outcome or "running",
        " → ".join(filter(None, (first.prefill_worker, first.decode_worker))),
        str(first.prompt_tokens),
        str(first.cached_tokens),
        str(sum(answer.completion_tokens for answer in answers)),
        time_text(request.ttft_seconds) if request.ttft_seconds else "-",
        time_text(request.end_to_end_seconds),
    ]


def _headline(request: pb.RequestTiming) -> Text:
    ended = request.outcome or "running"
    colour = "green" if ended in ("stop", "length") else "yellow"
    first = f", first token after {time_text(request.ttft_seconds)}" if request.ttft_seconds else ""
    total = f", {time_text(request.end_to_end_seconds)} in all"
    return Text.assemble((request.request_id, "bold"), " ", (ended, colour), first, total)


def _answer(answer: pb.AnswerTiming, answers: int) -> RenderableType:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(width=BAR_WIDTH, no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="fold")
    for phase in answer.phases:
        table.add_row(*_phase_cells(phase, answer))
    placement = _placement(answer, answers)
    return Group("", placement, "", table, "", _sums(answer), *_chunks(answer))


def _placement(answer: pb.AnswerTiming, answers: int) -> Text:
    workers = " → ".join(filter(None, (answer.prefill_worker, answer.decode_worker))) or "nowhere"
    name = f"answer {answer.index}: " if answers > 1 else ""
    cached = f" ({answer.cached_tokens} cached)" if answer.cached_tokens else ""
    again = f", {answer.attempts} attempts" if answer.attempts > 1 else ""
    why = f" ({answer.policy}, {answer.reason_code})" if answer.policy else ""
    return Text(
        f"{name}{workers}{why}{again}; {answer.prompt_tokens} prompt tokens{cached},"
        f" {answer.completion_tokens} answered"
    )


def _phase_cells(phase: pb.Phase, answer: pb.AnswerTiming) -> list[RenderableType]:
    name, colour = _KINDS.get(phase.kind, ("?", "white"))
    share = phase.seconds / answer.end_to_end_seconds if answer.end_to_end_seconds else 0.0
    return [
        Text(f"{name}, hidden" if phase.hidden else name, style="dim" if phase.hidden else ""),
        _bar(phase, answer.end_to_end_seconds, colour),
        time_text(phase.seconds),
        Text("hidden" if phase.hidden else f"{share:.1%}", style="dim"),
        Text(phase.worker, style="dim"),
    ]


def _bar(phase: pb.Phase, total: float, colour: str) -> Text:
    """At least one character wide, never beyond the end."""
    scale = BAR_WIDTH / total if total else 0.0
    start = min(int(phase.start_seconds * scale), BAR_WIDTH - 1)
    end = min(max(round((phase.start_seconds + phase.seconds) * scale), start + 1), BAR_WIDTH)
    return Text.assemble(" " * start, (("░" if phase.hidden else "█") * (end - start), colour))


def _sums(answer: pb.AnswerTiming) -> Text:
    parts = sum(phase.seconds for phase in answer.phases if not phase.hidden)
    text = f"the parts sum to {time_text(parts)} of {time_text(answer.end_to_end_seconds)}"
    if answer.completion_tokens > 1:
        each = (answer.end_to_end_seconds - answer.ttft_seconds) / (answer.completion_tokens - 1)
        longest = time_text(answer.longest_gap_seconds)
        text += f"; {time_text(each)} a token after the first, at most {longest}"
    if answer.transferred_bytes:
        text += f"; {answer.transferred_bytes / 2**20:.1f} MiB moved"
    return Text(text, style="dim")


def _chunks(answer: pb.AnswerTiming) -> list[Text]:
    if len(answer.chunks) < 2:
        return []
    chunks = ", ".join(f"{each.tokens} in {time_text(each.seconds)}" for each in answer.chunks)
    return [Text(f"prefill's chunks: {chunks}", style="dim")]


def time_text(seconds: float) -> str:
    """In microseconds, milliseconds or seconds."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} µs"
    if seconds < 1.0:
        return f"{seconds * 1e3:.1f} ms"
    return f"{seconds:.2f} s"


def _age(seconds: float) -> str:
    return f"{max(seconds, 0.0):.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
