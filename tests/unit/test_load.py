"""`baton bench`: what it asks, how it counts, and a run against a real HTTP server."""

from __future__ import annotations

import importlib.util
import itertools
import json
import statistics
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from command_line import Terminal
from typer.testing import CliRunner

from baton.cli.app import app
from baton.cli.load_run import Call, LoadReport, Objective, base_url
from baton.cli.load_test import Shape, parse_lengths
from baton.core.errors import InvalidRequest

FIXED = parse_lengths("10")


class Scripted(BaseHTTPRequestHandler):
    """A server of the OpenAI API that streams three words, unless the prompt is too long."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(200, json.dumps({"data": [{"id": "tale"}]}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if len(body["messages"][0]["content"].split()) > 50:
            self._answer(400, json.dumps({"error": {"message": "too long"}}))
            return
        words = [{"choices": [{"delta": {"content": word}}]} for word in ("a", "b", "c")]
        usage = {"choices": [], "usage": {"prompt_tokens": 10, "completion_tokens": 3}}
        lines = [*map(json.dumps, [*words, usage]), "[DONE]"]
        self._answer(200, "".join(f"data: {line}\n\n" for line in lines))

    def _answer(self, status: int, content: str) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content.encode())

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Scripted) as scripted:
        Thread(target=scripted.serve_forever, args=(0.02,), daemon=True).start()
        yield f"http://127.0.0.1:{scripted.server_port}"
        scripted.shutdown()


@pytest.mark.parametrize(
    ("text", "mean", "least", "most"),
    [
        ("100", 100, 100, 100),
        ("50..150", 100, 50, 150),
        ("normal:100:10", 100, 40, 160),
        ("lognormal:100:0.5", 113, 5, 2000),
    ],
)
def test_lengths_follow_their_distribution(text: str, mean: float, least: int, most: int) -> None:
    shape = Shape(3000, parse_lengths(text), parse_lengths(text), seed=1)
    drawn = [load.output_tokens for load in shape.loads()]
    assert statistics.fmean(drawn) == pytest.approx(mean, rel=0.05)
    assert least <= min(drawn) <= max(drawn) <= most


@pytest.mark.parametrize("text", ["", "x", "0", "-3", "nan", "5..", "normal:1", "beta:1:2", "inf"])
def test_a_length_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="is not a length"):
        parse_lengths(text)


def test_arrivals_come_at_the_rate_and_like_a_poisson_process() -> None:
    loads = Shape(4000, FIXED, FIXED, rate=5.0, seed=3).loads()
    times = [load.at_seconds for load in loads]
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert statistics.fmean(gaps) == pytest.approx(0.2, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(0.2, rel=0.1)
    even = Shape(5, FIXED, FIXED, rate=4.0, poisson=False).loads()
    assert [load.at_seconds for load in even] == [0.0, 0.25, 0.5, 0.75, 1.0]


def test_the_same_seed_makes_the_same_prompts_with_a_common_prefix() -> None:
    shape = Shape(3, parse_lengths("20..40"), FIXED, shared_tokens=8, seed=5)
    first = shape.loads()
    assert first == shape.loads()
    assert len({" ".join(load.prompt.split()[:8]) for load in first}) == 1
    assert len({load.prompt for load in first}) == 3


def test_goodput_counts_answers_that_keep_the_objective() -> None:
    fast = Call(0.0, ttft=0.1, seconds=1.1, output_tokens=11)
    late = Call(1.0, ttft=0.9, seconds=1.9, output_tokens=11)
    slow = Call(0.0, ttft=0.1, seconds=4.1, output_tokens=11)
    failed = Call(0.0, error="500")
    report = LoadReport.of([fast, late, slow, failed], Objective(0.5, 0.2))
    assert (report.good, report.failed, report.output_tokens) == (1, 1, 33)
    assert report.seconds == pytest.approx(4.1)
    assert report.goodput_per_second == pytest.approx(1 / 4.1)


@pytest.mark.parametrize("loop", [["--concurrency", "3"], ["--rate", "200"]])
def test_a_run_prints_json(server: str, loop: list[str]) -> None:
    arguments = ["bench", f"{server}/v1", "--requests", "8", "--prompt-tokens", "10", *loop]
    ran = CliRunner().invoke(app, [*arguments, "--json"])
    report = json.loads(ran.stdout)
    assert (report["model"], report["requests"], report["failed"]) == ("tale", 8, 0)
    assert (report["prompt_tokens"], report["output_tokens"]) == (80, 24)
    assert 0 < report["ttft"]["p50"] <= report["e2e"]["p99"]


def test_errors_are_counted_by_message(server: str) -> None:
    arguments = ["bench", server, "--requests", "4", "--prompt-tokens", "60", "--slo-ttft", "1"]
    ran = CliRunner().invoke(app, arguments)
    assert ran.exit_code == 1
    assert "0 of 4 answered" in ran.stdout
    assert "4 x 400: too long" in ran.stdout


def test_a_picture_is_drawn_where_that_is_possible(server: str, tmp_path: Path) -> None:
    picture = tmp_path / "times.png"
    arguments = ["bench", server, "--requests", "3", "--prompt-tokens", "9", "--plot", str(picture)]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_plot_that_cannot_be_drawn_is_refused_before_the_load(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = CliRunner().invoke(app, ["bench", server, "--plot", str(tmp_path / "none" / "a.png")])
    assert (ran.exit_code, ran.stdout) == (1, "")
    assert "there is no folder" in ran.stderr
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    ran = CliRunner().invoke(app, ["bench", server, "--plot", str(tmp_path / "a.png")])
    assert (ran.exit_code, ran.stdout) == (1, "")
    assert ran.stderr == "baton: a plot needs matplotlib: install baton-llm[plot]\n"


def test_the_report_comes_before_a_plot_that_fails(server: str, tmp_path: Path) -> None:
    arguments = ["bench", server, "--requests", "3", "--prompt-tokens", "9"]
    ran = CliRunner().invoke(app, [*arguments, "--plot", str(tmp_path / "a.strange")])
    assert ran.exit_code == 1
    assert "3 of 3 answered" in ran.stdout
    assert "baton: cannot draw" in ran.stderr


def test_control_c_prints_what_was_measured(server: str) -> None:
    arguments = ["bench", server, "--requests", "1000", "--rate", "5", "--prompt-tokens", "9"]
    terminal = Terminal(*arguments)
    try:
        terminal.wait_for("3 tokens")
        terminal.press_control_c()
        terminal.wait_for("answered in")
        terminal.wait_for("interrupted; ")
        assert terminal.process.wait(20) == 130
    finally:
        terminal.close()


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "grpc://127.0.0.1:8000"])
def test_an_address_that_is_no_url_is_named(url: str) -> None:
    ran = CliRunner().invoke(app, ["bench", url])
    assert ran.exit_code == 1
    assert ran.stderr == f"baton: '{url}' is not a URL; write http://127.0.0.1:8000\n"


def test_a_missing_server_is_one_line() -> None:
    ran = CliRunner().invoke(app, ["bench", "http://127.0.0.1:9"])
    assert (ran.exit_code, ran.stderr) == (
        1,
        "baton: no server answers at http://127.0.0.1:9/v1/\n",
    )


def test_urls_may_have_their_v1_or_not() -> None:
    assert base_url("http://a:1") == base_url("http://a:1/v1") == base_url("http://a:1/v1/")
