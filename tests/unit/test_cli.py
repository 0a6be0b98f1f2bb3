"""`baton …` against a real gRPC server: in this process, and in a terminal where that matters."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from scripted_router import ScriptedRouter, pools
from typer.testing import CliRunner, Result

from baton.v1 import worker_pb2
from cli.main import app
from cli.restart import is_back
from cli.status_table import BAR_WIDTH, duration, page_bar
from cli.top_picture import sparkline
from core.errors import PromptTooLong

BATON = [sys.executable, "-c", "from cli.main import app; app()"]


def run(router: ScriptedRouter, *arguments: str, stdin: str = "") -> Result:
    return CliRunner().invoke(app, [*arguments, "--address", router.address], input=stdin)


class Terminal:
    """A command that runs in a terminal of its own."""

    def __init__(self, *arguments: str) -> None:
        self._screen, inside = pty.openpty()
        self.process = subprocess.Popen(
            [*BATON, *arguments],
            stdin=inside,
            stdout=inside,
            stderr=inside,
            env=os.environ | {"TERM": "xterm", "COLUMNS": "160"},
        )
        os.close(inside)
        self.shown = ""

    def type(self, text: str) -> None:
        os.write(self._screen, text.encode())

    def press_control_c(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def wait_for(self, text: str) -> None:
        """Reads on until `text` is shown, and forgets what came up to it."""
        deadline = time.monotonic() + 20
        while text not in self.shown:
            ready, _, _ = select.select([self._screen], [], [], deadline - time.monotonic())
            assert ready, f"{text!r} never came; the terminal shows {self.shown!r}"
            self.shown += os.read(self._screen, 4096).decode()
        self.shown = self.shown.partition(text)[2]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._screen)


@pytest.fixture
def terminal(router: ScriptedRouter, request: pytest.FixtureRequest) -> Iterator[Terminal]:
    router.hang = True
    opened = Terminal(*request.param, "--address", router.address)
    yield opened
    opened.close()


def test_starting_the_command_line_loads_nothing_heavy() -> None:
    listing = subprocess.run(
        [sys.executable, "-c", "import sys, cli.main; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert not {"torch", "ray", "transformers", "numpy"} & set(listing.stdout.split())


# baton generate


def test_generate_writes_the_text_and_nothing_else(router: ScriptedRouter) -> None:
    result = run(router, "generate", "hello")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "Once upon a time\n", "")


def test_an_answer_that_ends_its_line_gets_no_second_end(router: ScriptedRouter) -> None:
    router.pieces = ["done\n"]
    assert run(router, "generate", "hello").stdout == "done\n"


def test_a_prompt_is_a_users_message_where_there_is_a_template(router: ScriptedRouter) -> None:
    run(router, "generate", "hello", "--system", "be brief")
    said = [(message.role, message.content) for message in router.requests[0].chat.messages]
    assert said == [("system", "be brief"), ("user", "hello")]


def test_a_prompt_is_plain_text_where_there_is_no_template(router: ScriptedRouter) -> None:
    router.has_chat_template = False
    run(router, "generate", "hello")
    assert router.requests[0].text == "hello"


def test_raw_makes_a_prompt_plain_text(router: ScriptedRouter) -> None:
    run(router, "generate", "--raw", "hello")
    assert router.requests[0].text == "hello"


@pytest.mark.parametrize("arguments", [[], ["-"]])
def test_a_prompt_can_be_piped_in(router: ScriptedRouter, arguments: list[str]) -> None:
    run(router, "generate", "--raw", *arguments, stdin="two\nlines\n")
    assert router.requests[0].text == "two\nlines"


def test_generate_passes_every_option_on(router: ScriptedRouter) -> None:
    options = (
        "--max-tokens 9 --temperature 0.5 --top-k 40 --top-p 0.75 --min-p 0.125"
        " --repetition-penalty 1.5 --presence-penalty 0.25 --frequency-penalty -0.25"
        " --seed 3 --stop END --stop FIN --ignore-eos --timeout 30 --n 2"
    )
    run(router, "generate", "hello", *options.split())
    [request] = router.requests
    sampling = {field.name: value for field, value in request.sampling.ListFields()}
    assert sampling == {
        "temperature": 0.5,
        "top_k": 40,
        "top_p": 0.75,
        "min_p": 0.125,
        "repetition_penalty": 1.5,
        "presence_penalty": 0.25,
        "frequency_penalty": -0.25,
        "seed": 3,
    }
    assert (request.max_tokens, list(request.stop), request.ignore_eos) == (9, ["END", "FIN"], True)
    assert request.n == 2


def test_several_answers_are_shown_one_after_the_other(router: ScriptedRouter) -> None:
    shown = run(router, "generate", "hello", "--n", "2").stdout
    assert shown == "--- 0 ---\nOnce upon a time\n--- 1 ---\nOnce upon a time\n"


def test_json_tells_the_whole_answer_and_its_times(router: ScriptedRouter) -> None:
    answer = json.loads(run(router, "generate", "hello", "--json").stdout)
    assert 0 < answer.pop("ttft_seconds") <= answer.pop("total_seconds")
    [choice] = answer.pop("choices")
    assert (choice["index"], choice["finish_reason"]) == (0, "stop")
    assert answer == {
        "text": "Once upon a time",
        "token_ids": [0, 1, 2],
        "finish_reason": "stop",
        "stop": "\n\n",
        "usage": {
            "prompt_tokens": 4,
            "completion_tokens": 3,
            "cached_tokens": 2,
            "fetched_tokens": 0,
        },
        "logprobs": [],
        "reasoning": "",
        "tool_calls": [],
        "prompt_logprobs": [],
        "request_id": "request-1",
        "model": "tale",
        "seed": 7,
        "prefill_worker": "prefill-0",
        "decode_worker": "decode-0",
        "placements": [
            {
                "prefill_worker": "prefill-0",
                "decode_worker": "decode-0",
                "policy": "split",
                "reason": "least loaded",
                "reason_code": "least_loaded",
                "predicted_seconds": 0.5,
            }
        ],
    }


def test_an_error_is_one_line_and_exit_code_1(router: ScriptedRouter) -> None:
    router.error = PromptTooLong("the prompt has 9000 tokens;\nthe model takes 8192")
    result = run(router, "generate", "hello")
    assert result.exit_code == 1
    assert result.stdout == "Once upon a time\n"
    assert result.stderr == "baton: the prompt has 9000 tokens; the model takes 8192\n"


@pytest.mark.parametrize("command", [["generate", "hello"], ["chat"], ["status"]])
def test_a_missing_router_is_named_with_what_to_do(
    router: ScriptedRouter, command: list[str]
) -> None:
    router.stop()
    result = run(router, *command)
    assert result.exit_code == 1
    assert result.stderr == (
        f"baton: no Baton router answers at {router.address}; start one with `baton serve`\n"
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate", "hello", "--max-tokens", "none"],
        ["generate", "hello", "--max-tokens", "0"],
        ["generate", "hello", "--raw", "--system", "be brief"],
        ["generate", "hello", "--unheard-of"],
        ["status", "--watch", "--json"],
        ["unheard-of"],
    ],
)
def test_bad_usage_is_exit_code_2(router: ScriptedRouter, arguments: list[str]) -> None:
    assert run(router, *arguments).exit_code == 2


@pytest.mark.parametrize("terminal", [["generate", "hello"]], indirect=True)
def test_control_c_cancels_the_request_and_exits_with_130(
    terminal: Terminal, router: ScriptedRouter
) -> None:
    terminal.wait_for("a time")
    terminal.press_control_c()
    assert router.over.wait(5)
    assert terminal.process.wait(10) == 130


@pytest.mark.parametrize("terminal", [["generate", "hello"]], indirect=True)
def test_a_terminal_sees_how_fast_it_went(terminal: Terminal, router: ScriptedRouter) -> None:
    terminal.wait_for("a time")
    router.over.set()
    terminal.wait_for("3 tokens, ")
    terminal.wait_for(" tokens/s, first after ")


# baton chat


def said(router: ScriptedRouter, number: int) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in router.requests[number].chat.messages]


def test_a_chat_remembers_what_was_said(router: ScriptedRouter) -> None:
    result = run(router, "chat", "--seed", "3", stdin="hello\n\nand then?\n")
    assert (result.exit_code, result.stdout) == (0, "Once upon a time\n" * 2)
    assert said(router, 1) == [
        ("user", "hello"),
        ("assistant", "Once upon a time"),
        ("user", "and then?"),
    ]
    assert router.requests[1].sampling.seed == 3


def test_reset_forgets_all_but_the_system_message(router: ScriptedRouter) -> None:
    run(router, "chat", "--system", "be brief", stdin="hello\n/reset\nagain\n")
    assert said(router, 1) == [("system", "be brief"), ("user", "again")]


def test_the_system_message_can_change_on_the_way(router: ScriptedRouter) -> None:
    run(router, "chat", stdin="/system be brief\nhello\n/system\nagain\n")
    assert said(router, 0) == [("system", "be brief"), ("user", "hello")]
    assert [role for role, _ in said(router, 1)] == ["user", "assistant", "user"]


def test_exit_leaves_the_rest_unread(router: ScriptedRouter) -> None:
    assert run(router, "chat", stdin="hello\n/exit\nmore\n").exit_code == 0
    assert len(router.requests) == 1


def test_help_and_unknown_commands_are_not_sent(router: ScriptedRouter) -> None:
    result = run(router, "chat", stdin="/help\n/dance\n")
    assert "/system TEXT" in result.stderr
    assert "baton: there is no /dance" in result.stderr
    assert (result.stdout, router.requests) == ("", [])


def test_an_error_ends_a_piped_chat(router: ScriptedRouter) -> None:
    router.error = PromptTooLong("too long")
    result = run(router, "chat", stdin="hello\nmore\n")
    assert (result.exit_code, result.stderr) == (1, "baton: too long\n")


def test_a_model_without_a_template_cannot_chat(router: ScriptedRouter) -> None:
    router.has_chat_template = False
    result = run(router, "chat", stdin="hello\n")
    assert result.exit_code == 1
    assert "no chat template" in result.stderr


@pytest.mark.parametrize("terminal", [["chat"]], indirect=True)
def test_control_c_stops_the_answer_and_keeps_the_chat(
    terminal: Terminal, router: ScriptedRouter
) -> None:
    terminal.wait_for("> ")
    terminal.type("hello\n")
    terminal.wait_for("a time")
    terminal.press_control_c()
    terminal.wait_for("> ")
    router.hang = False
    terminal.type("go on\n")
    terminal.wait_for("a time")
    terminal.wait_for("> ")
    terminal.type("\x04")
    assert terminal.process.wait(10) == 0
    assert said(router, 1) == [
        ("user", "hello"),
        ("assistant", "Once upon a time"),
        ("user", "go on"),
    ]


@pytest.mark.parametrize("terminal", [["chat"]], indirect=True)
def test_an_error_does_not_end_a_chat_in_a_terminal(
    terminal: Terminal, router: ScriptedRouter
) -> None:
    router.hang, router.error = False, PromptTooLong("too long")
    terminal.wait_for("> ")
    terminal.type("hello\n")
    terminal.wait_for("baton: too long")
    terminal.wait_for("> ")


# baton status


def test_status_shows_the_router_and_a_row_for_each_worker(router: ScriptedRouter) -> None:
    lines = run(router, "status").stdout.splitlines()
    assert lines[0] == (
        f"tale by router-0 at {router.address}, up 1 h 2 min, 4 active, 1 queued, 1234 finished"
    )
    assert [line.split() for line in lines[3:7]] == [
        ["prefill-0", "prefill", "yes", "░" * BAR_WIDTH, "0", "0", "0", "-"],
        ["127.0.0.1:6001", "0+0+0+16", "of", "16"],
        ["decode-0", "decode", "yes", "██████▓▓▒▒▒░░░░░", "1", "4", "4", "75%"],
        ["127.0.0.1:6002", "6+2+3+5", "of", "16"],
    ]


def test_status_shows_what_is_in_the_second_tier(router: ScriptedRouter) -> None:
    router.status.workers[1].load.kept_pages = 1234
    assert "1234 in second tier" in run(router, "status").stdout


def test_status_says_why_a_worker_cannot_be_used(router: ScriptedRouter) -> None:
    router.status.workers[0].attached = False
    router.status.workers[0].fault = "leaks pages"
    lines = run(router, "status").stdout.splitlines()
    assert lines[3].split()[:3] == ["prefill-0", "prefill", "no"]
    assert "prefill-0: leaks pages" in [line.strip() for line in lines]


def test_status_shows_who_is_drained(router: ScriptedRouter) -> None:
    router.status.workers[0].draining = True
    lines = run(router, "status").stdout.splitlines()
    assert lines[3].split()[:3] == ["prefill-0", "prefill", "draining"]


def test_status_has_no_line_for_an_address_that_is_not_told(router: ScriptedRouter) -> None:
    for worker in router.status.workers:
        worker.member.address = ""
    lines = run(router, "status").stdout.splitlines()
    assert lines[4].split()[1:] == ["of", "16"]


def test_drain_waits_until_the_worker_is_gone(router: ScriptedRouter) -> None:
    ended = run(router, "drain", "decode-0")
    assert ended.stdout == "decode-0 is drained\n"
    assert router.drained == ["decode-0"]


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


def test_restart_leaves_the_only_worker_of_a_pool_unless_told(router: ScriptedRouter) -> None:
    ended = run(router, "restart", "decode-0")
    assert (ended.exit_code, router.drained) == (1, [])
    assert "decode-0 is the only worker of its pool" in ended.stderr
    assert run(router, "restart", "decode-0", "--last").exit_code == 0
    assert router.drained == ["decode-0"]


def test_restart_names_a_worker_that_is_not_there(router: ScriptedRouter) -> None:
    ended = run(router, "restart", "nobody")
    assert (ended.exit_code, router.drained) == (1, [])
    assert "no worker called 'nobody'" in ended.stderr


def test_restart_says_when_a_worker_does_not_come_back(router: ScriptedRouter) -> None:
    router.status.workers[1].load.Clear()
    ended = run(router, "restart", "decode-0", "--last", "--wait", "0.1")
    assert ended.exit_code == 1
    assert "decode-0 is not back yet" in ended.stderr


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


def test_status_says_who_does_not_fit_whom(router: ScriptedRouter) -> None:
    for worker, other in (("prefill-0", "decode-0"), ("decode-0", "prefill-0")):
        index = ("prefill-0", "decode-0").index(worker)
        router.status.workers[index].misfits.add(worker_id=other, reason="versions differ")
    lines = [line.strip() for line in run(router, "status").stdout.splitlines()]
    assert lines.count("prefill-0 and decode-0: versions differ") == 1
    assert "decode-0 and prefill-0: versions differ" not in lines


def test_scale_waits_until_the_pools_are_as_wanted(router: ScriptedRouter) -> None:
    router.pools = [
        pools(prefill_0="ready", decode_0="ready", decode_1="loading the model"),
        pools(prefill_0="ready", decode_0="ready", decode_1="ready"),
    ]
    ended = run(router, "scale", "--decode", "2")
    assert ended.stdout == "1 prefill and 2 decode workers serve\n"
    assert ended.stderr.split() == ["decode-1", "loading", "the", "model", "decode-1", "ready"]
    assert router.scaled == [(0, 2)]


def test_scale_waits_for_workers_that_drain(router: ScriptedRouter) -> None:
    router.pools = [
        pools(prefill_0="ready", prefill_1="draining", decode_0="ready", decode_1="ready"),
        pools(prefill_0="ready", decode_0="ready", decode_1="ready"),
    ]
    ended = run(router, "scale", "--prefill", "1", "--json")
    lines = [json.loads(line) for line in ended.stdout.splitlines()]
    assert [len(line["workers"]) for line in lines] == [4, 3]
    assert lines[0]["workers"][1]["retiring"]


def test_scale_need_not_wait(router: ScriptedRouter) -> None:
    router.pools = [pools(prefill_0="ready", decode_0="ready", decode_1="starting")]
    ended = run(router, "scale", "--decode", "2", "--no-wait")
    assert ended.stdout == "1 prefill and 2 decode workers are wanted\n"


def test_scale_says_who_is_late(router: ScriptedRouter) -> None:
    router.pools = [pools(prefill_0="ready", decode_0="starting")]
    ended = run(router, "scale", "--decode", "2", "--timeout", "0")
    assert ended.exit_code == 1
    assert "not yet as wanted: decode-0 (starting)" in ended.stderr


@pytest.mark.parametrize("flags", [[], ["--decode", "0"]])
def test_scale_wants_a_number_above_0(router: ScriptedRouter, flags: list[str]) -> None:
    assert run(router, "scale", *flags).exit_code == 2
    assert router.scaled == []


def test_role_says_how_long_it_took_beyond_the_drain(router: ScriptedRouter) -> None:
    told = run(router, "role", "decode-0", "prefill").stdout
    assert told == "decode-0 is a prefill worker: drained in 1.50 s, ready 0.062 s later\n"
    fields = json.loads(run(router, "role", "decode-0", "prefill", "--json").stdout)
    assert fields["switch_seconds"] == 0.0625
    assert router.switched == [("decode-0", worker_pb2.ROLE_PREFILL)] * 2


def test_drain_tells_scripts_too(router: ScriptedRouter) -> None:
    told = json.loads(run(router, "drain", "decode-0", "--json").stdout)
    assert told == {"worker": "decode-0", "drained": True}


def test_plan_shows_the_decisions_and_their_reasons(router: ScriptedRouter) -> None:
    router.plan.enabled = router.plan.acts = True
    router.plan.ttft, router.plan.itl, router.plan.most_workers = 2.0, 0.05, 4
    router.plan.last.words = "no change"
    made = router.plan.changes.add(words="switch 1 from decode to prefill", have_prefill=1)
    made.reasons.append("decode can spare 1")
    lines = run(router, "plan").stdout.splitlines()
    assert lines[0] == (
        "the planner changes the pools: first token within 2 s, 50 ms between two, at most 4"
        " workers"
    )
    assert lines[1].split() == ["now", "no", "change", "(0", "+", "0", "workers)"]
    assert "switch 1 from decode to prefill  (1 + 0 workers)" in lines[2]
    assert lines[3].strip() == "decode can spare 1"


def test_plan_says_when_there_is_no_planner(router: ScriptedRouter) -> None:
    assert "no planner runs here" in run(router, "plan").stdout


def test_status_as_json_is_what_the_router_said(router: ScriptedRouter) -> None:
    status = json.loads(run(router, "status", "--json").stdout)
    assert (status["model"], status["finished_requests"]) == ("tale", 1234)
    assert status["workers"][1]["load"]["quarantined_pages"] == 2
    assert status["workers"][1]["member"]["role"] == "decode"


@pytest.mark.parametrize("terminal", [["status", "--watch"]], indirect=True)
def test_watch_shows_what_changes(terminal: Terminal, router: ScriptedRouter) -> None:
    terminal.wait_for("1234 finished")
    router.status.finished_requests = 1235
    terminal.wait_for("1235 finished")
    terminal.press_control_c()
    assert terminal.process.wait(10) == 130


@pytest.mark.parametrize(
    ("leased", "quarantined", "cached", "free"),
    [(0, 0, 0, 1), (1, 1, 1, 2), (1, 1, 1, 998), (333, 333, 333, 334), (0, 7, 0, 0)],
)
def test_every_page_bar_is_equally_long(
    leased: int, quarantined: int, cached: int, free: int
) -> None:
    load = worker_pb2.Load(
        leased_pages=leased, quarantined_pages=quarantined, cached_pages=cached, free_pages=free
    )
    assert len(page_bar(load)) == BAR_WIDTH


def test_a_worker_that_never_reported_has_no_bar() -> None:
    assert not page_bar(worker_pb2.Load()).plain.strip()


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.4, "0 s"), (59, "59 s"), (61, "1 min"), (3723, "1 h 2 min"), (183_600, "2 d 3 h")],
)
def test_a_duration_reads_as_people_say_it(seconds: float, said: str) -> None:
    assert duration(seconds) == said


# baton model


def test_the_path_of_a_model_is_its_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    result = CliRunner().invoke(app, ["model", "path", str(tmp_path)])
    assert result.stdout == f"{tmp_path}\n"


def test_a_model_that_is_not_there_is_one_line_and_exit_code_1() -> None:
    result = CliRunner().invoke(app, ["model", "path", "/no/such/folder"])
    assert result.exit_code == 1
    assert result.stderr.startswith("baton: '/no/such/folder' is not a folder")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        (["why", "--jsn"], "--json"),
        (["serve", "--prefil", "2"], "--prefill"),
        (["sttus"], "status"),
    ],
)
def test_a_wrong_word_names_the_right_one(wrong: list[str], right: str) -> None:
    said = CliRunner().invoke(app, wrong, env={"COLUMNS": "160"})
    assert said.exit_code == 2
    assert right in said.stderr


def test_the_shell_can_be_taught_the_commands() -> None:
    variables = {"_BATON_COMPLETE": "complete_bash", "COMP_WORDS": "baton di", "COMP_CWORD": "1"}
    told = CliRunner().invoke(app, [], env=variables, prog_name="baton")
    assert "diagnose" in told.stdout


def test_bars_grow_with_their_values() -> None:
    assert sparkline([0.0, 0.1, 4.0, 8.0]) == " ▁▄█"
    assert sparkline([]) == ""
