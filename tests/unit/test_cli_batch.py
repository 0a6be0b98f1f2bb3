"""`baton batch`, against a router in front of workers that answer at once."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from front_door import front_door_beside
from typer.testing import CliRunner, Result

from baton.cli import batch_command
from baton.cli.app import app

BODY = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with front_door_beside() as door:
        yield f"http://{door.http_address}"


def line(name: str, **body: object) -> dict[str, object]:
    url = "/v1/chat/completions"
    return {"custom_id": name, "method": "POST", "url": url, "body": {**BODY, **body}}


def write(path: Path, *lines: object) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in lines))
    return path


def run(url: str, *arguments: object) -> Result:
    return CliRunner().invoke(app, ["batch", *map(str, arguments), "--url", url])


def ids(path: Path) -> list[str]:
    return [json.loads(each)["custom_id"] for each in path.read_text().splitlines()]


def test_every_line_has_its_result(url: str, tmp_path: Path) -> None:
    names = [f"line-{index}" for index in range(40)]
    requests = write(tmp_path / "in.jsonl", *map(line, names), line("wrong", temperature=9))
    results = tmp_path / "out.jsonl"
    ran = run(url, requests, results, "--json")
    assert ran.exit_code == 1  # one was refused
    counts = {"answered": 40, "refused": 1, "before": 0, "refused_before": 0}
    assert json.loads(ran.stdout) == counts
    assert sorted(ids(results)) == sorted([*names, "wrong"])
    statuses = {
        found["custom_id"]: found["response"]["status_code"]
        for found in map(json.loads, results.read_text().splitlines())
    }
    assert statuses == {**dict.fromkeys(names, 200), "wrong": 400}
    again = run(url, requests, results)
    assert (again.exit_code, again.stdout) == (
        1,
        "0 requests answered, 0 refused, 41 done before (1 refused)\n",
    )


def test_a_run_that_was_cut_off_is_continued(url: str, tmp_path: Path) -> None:
    names = [f"line-{index}" for index in range(9)]
    requests, results = write(tmp_path / "in.jsonl", *map(line, names)), tmp_path / "out.jsonl"
    assert run(url, requests, results).exit_code == 0
    whole = results.read_bytes().splitlines(keepends=True)
    cut = b"".join(whole[:4]) + whole[4][:20]
    results.write_bytes(cut)
    ran = run(url, requests, results)
    assert (ran.exit_code, ran.stdout) == (0, "5 requests answered, 0 refused, 4 done before\n")
    assert sorted(ids(results)) == names
    assert results.read_bytes().startswith(b"".join(whole[:4]))


LIMITED = """
import resource
from baton.cli.app import app
resource.setrlimit(resource.RLIMIT_FSIZE, (1500, 1500))
app()
"""


def test_a_full_disk_leaves_whole_results_and_a_run_that_continues(
    url: str, tmp_path: Path
) -> None:
    names = [f"line-{index}" for index in range(9)]
    requests, results = write(tmp_path / "in.jsonl", *map(line, names)), tmp_path / "out.jsonl"
    command = [sys.executable, "-c", LIMITED, "batch", str(requests), str(results), "--url", url]
    ended = subprocess.run(command, capture_output=True, encoding="utf-8", check=False)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.strip() == f"baton: cannot write {results}: File too large"
    assert results.read_text().endswith("}\n")
    before = len(ids(results))
    assert 0 < before < 9
    ran = run(url, requests, results)
    told = f"{9 - before} requests answered, 0 refused, {before} done before\n"
    assert (ran.exit_code, ran.stdout) == (0, told)
    assert sorted(ids(results)) == names


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([line("a"), {"custom_id": "b"}], "line 2: url must be one of"),
        ([line("a"), line("a")], "line 2: custom_id must not be that of an earlier line"),
        ([line("a", stream=True)], "line 1: body.stream must be false"),
    ],
)
def test_a_wrong_line_is_named(lines: list[object], message: str, url: str, tmp_path: Path) -> None:
    ran = run(url, write(tmp_path / "in.jsonl", *lines), tmp_path / "out.jsonl")
    assert ran.exit_code == 1
    assert message in ran.stderr


@pytest.mark.parametrize("text", ["Buy milk.\nBuy tea.\n", "Buy milk.", '{"a": 1}', "[]\n"])
def test_other_files_are_not_written_over(text: str, url: str, tmp_path: Path) -> None:
    requests = write(tmp_path / "in.jsonl", line("a"))
    notes = tmp_path / "notes.txt"
    notes.write_text(text)
    ran = run(url, requests, notes)
    assert (ran.exit_code, "not results of a batch" in ran.stderr) == (1, True)
    assert notes.read_text() == text
    sent = requests.read_text()
    ran = run(url, requests, requests)
    assert (ran.exit_code, "not results of a batch" in ran.stderr) == (1, True)
    assert requests.read_text() == sent
    assert run(url, tmp_path / "none.jsonl", tmp_path / "out.jsonl").exit_code == 1


def test_a_router_that_is_not_there_is_named(tmp_path: Path) -> None:
    requests = write(tmp_path / "in.jsonl", line("a"))
    ran = run("http://127.0.0.1:9", requests, tmp_path / "out.jsonl")
    assert (ran.exit_code, "no server answers at http://127.0.0.1:9" in ran.stderr) == (1, True)


class Forgetful(BaseHTTPRequestHandler):
    """Names its model, and answers nothing else."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"data": [{"id": "m"}]}')

    def do_POST(self) -> None:
        self.close_connection = True

    def log_message(self, format: str, *args: object) -> None: ...


def test_a_router_that_goes_away_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_command, "GIVE_UP_SECONDS", 0.0)
    requests = write(tmp_path / "in.jsonl", line("a"), line("b"))
    with ThreadingHTTPServer(("127.0.0.1", 0), Forgetful) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        ran = run(f"http://127.0.0.1:{server.server_port}", requests, tmp_path / "out.jsonl")
        server.shutdown()
    assert (ran.exit_code, "run this again later" in ran.stderr) == (1, True)
    assert (tmp_path / "out.jsonl").read_bytes() == b""
