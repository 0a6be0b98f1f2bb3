"""What all commands of `baton …` have in common."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import BATON, run
from random_shapes import SHAPES
from scripted_router import ScriptedRouter
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command
from typer.testing import CliRunner

from baton.cli.app import app
from baton.cli.serve import instructions
from baton.cluster.fleet import Member
from baton.core import config as configs

WITHOUT_JSON = {
    "baton serve",  # runs until it is stopped; `baton status` tells of what it serves
    "baton chat",  # talks; `baton generate` tells of one answer
}


def test_starting_the_command_line_loads_nothing_heavy() -> None:
    listing = subprocess.run(
        [sys.executable, "-c", "import sys, baton.cli.app; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert not {"torch", "ray", "transformers", "numpy"} & set(listing.stdout.split())


INTERRUPTED = """
import os, signal, sys

class Interrupts:
    def find_spec(self, name, path, target=None):
        if name == "typer.main":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupts())
from baton.__main__ import main
main()
"""


def test_control_c_ends_a_command_that_is_still_loaded_without_a_stack() -> None:
    command = [sys.executable, "-c", INTERRUPTED, "status"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (-signal.SIGINT, "", "")


def test_the_commands_that_serve_prints_name_one_of_several_models(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["small"]))
    router = Member("router-0", None, "", address="127.0.0.1:1", http="127.0.0.1:2")
    model = {"model": str(tmp_path)}
    shown = instructions(router, configs.parse({"models": {"a": model, "b": model}}), "logs")
    assert 'baton generate --address 127.0.0.1:1 --model a "What' in shown
    assert "baton chat --address 127.0.0.1:1 --model a\n" in shown
    assert '.chat([("user", "Hello")], model="a").text' in shown
    assert """-d '{"model": "a", "messages": [""" in shown
    alone = instructions(router, configs.parse(model), "logs")
    assert "--model" not in alone
    assert '"model"' not in alone


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


@pytest.mark.parametrize("command", ["status", "chat", "top"])
def test_a_url_is_no_address_of_a_router(command: str) -> None:
    result = CliRunner().invoke(app, [command, "--address", "http://127.0.0.1:8000"])
    assert result.exit_code == 1
    assert result.stderr == (
        "baton: 'http://127.0.0.1:8000' is a URL; give HOST:PORT of a router's"
        " gRPC API, such as 127.0.0.1:50051\n"
    )


@pytest.mark.parametrize("address", ["", "gpu-7"])
def test_an_address_without_a_port_is_named(address: str) -> None:
    result = CliRunner().invoke(app, ["status", "--address", address])
    assert result.exit_code == 1
    assert result.stderr.startswith(
        f"baton: {address!r} has no port; give HOST:PORT of a router's gRPC API"
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


def test_the_path_of_a_model_is_its_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    result = CliRunner().invoke(app, ["model", "path", str(tmp_path)])
    assert result.stdout == f"{tmp_path}\n"
    result = CliRunner().invoke(app, ["model", "path", str(tmp_path), "--json"])
    assert json.loads(result.stdout) == {"folder": str(tmp_path)}


def test_a_model_that_is_not_there_is_one_line_and_exit_code_1() -> None:
    result = CliRunner().invoke(app, ["model", "path", "/no/such/folder"])
    assert result.exit_code == 1
    assert result.stderr.startswith("baton: '/no/such/folder' is not a folder")
    assert result.stderr.count("\n") == 1


def run_in_shell(script: str, *arguments: str, **environment: str) -> tuple[int, str, str]:
    """Runs `script` with `baton ARGUMENTS` as its "$@"; returns exit code, stdout and stderr."""
    ended = subprocess.run(
        ["sh", "-c", script, "sh", *BATON, *arguments],
        env=os.environ | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    return ended.returncode, ended.stdout, ended.stderr


@pytest.mark.parametrize(
    ("command", "script", "why"),
    [
        (["generate", "hello"], '"$@" >&-', "Bad file descriptor"),
        (["generate", "hello"], '"$@" >/dev/full', "No space left on device"),
        (["generate", "hello", "--json"], '"$@" >/dev/full', "No space left on device"),
        (["status"], '"$@" >/dev/full', "No space left on device"),
    ],
)
def test_an_output_that_cannot_be_written_is_one_line_and_exit_code_1(
    router: ScriptedRouter, command: list[str], script: str, why: str
) -> None:
    ended = run_in_shell(script, *command, "--address", router.address)
    assert ended == (1, "", f"baton: cannot write the output: {why}\n")


def test_help_that_cannot_be_written_is_one_line_and_exit_code_1() -> None:
    ended = run_in_shell('"$@" >/dev/full', "keys", "--help")
    assert ended == (1, "", "baton: cannot write the output: No space left on device\n")


@pytest.mark.parametrize("errors", [">/dev/full", ">&-"])
def test_notes_that_cannot_be_written_are_dropped(router: ScriptedRouter, errors: str) -> None:
    command = ["drain", "decode-0", "--last", "--address", router.address]
    ended = run_in_shell(f'"$@" 2{errors}', *command)
    assert ended == (0, "decode-0 is drained\n", "")


def test_a_reader_that_has_seen_enough_ends_a_command_in_silence(router: ScriptedRouter) -> None:
    router.pieces = ["word "] * 20_000
    ended = run_in_shell('"$@" | head -c 4', "generate", "hello", "--address", router.address)
    assert ended == (0, "word", "")


def test_a_closed_input_is_an_empty_one(router: ScriptedRouter) -> None:
    router.pieces = ["done"]
    ended = run_in_shell('"$@" <&-', "generate", "--raw", "--address", router.address)
    assert ended == (0, "done\n", "")
    assert [request.text for request in router.requests] == [""]
    assert run_in_shell('"$@" <&-', "chat", "--address", router.address) == (0, "", "")


def test_what_an_encoding_lacks_is_replaced(router: ScriptedRouter) -> None:
    router.status.model, router.pieces = "\N{SNOWMAN}", ["\N{SNOWMAN}"]
    ascii_only = {"PYTHONIOENCODING": "ascii"}
    command = ["generate", "hello", "--address", router.address]
    assert run_in_shell('"$@"', *command, **ascii_only) == (0, "?\n", "")
    code, told, _ = run_in_shell('"$@"', "status", "--address", router.address, **ascii_only)
    assert (code, "?" in told) == (0, True)


def test_json_loses_no_text_to_an_encoding(router: ScriptedRouter) -> None:
    router.pieces = ["\N{SNOWMAN}"]
    command = ["generate", "hello", "--json", "--address", router.address]
    code, told, errors = run_in_shell('"$@"', *command, PYTHONIOENCODING="latin-1")
    assert (code, json.loads(told)["text"], errors) == (0, "\N{SNOWMAN}", "")


TRACE_LINE = '{"timestamp": 7, "input_length": 8, "output_length": 9, "hash_ids": [3]}\n'


@pytest.mark.parametrize(
    ("written", "fault"),
    [
        (None, "cannot read {}: No such file or directory"),
        ("", "{} is not a trace: it has no request"),
        ("{}", "{} is not a trace: line 1 has no 'hash_ids'"),
        ("hello", "{} is not a trace: line 1 is not valid JSON: Expecting value at column 1"),
        ("\n[]", "{} is not a trace: line 2: it is not a JSON object"),
        (
            TRACE_LINE + "{a",
            "{} is not a trace: line 2 is not valid JSON: Expecting property name"
            " enclosed in double quotes at column 2",
        ),
        *(
            (TRACE_LINE.replace(right, wrong), f"{{}} is not a trace: line 1: {fault}")
            for right, wrong, fault in (
                (": 7", ": NaN", "timestamp must be a number from 0 to 2^53, not nan"),
                (": 7", ": 1e30", "timestamp must be a number from 0 to 2^53, not 1e+30"),
                (": 7", ': "7"', "timestamp must be a number from 0 to 2^53, not '7'"),
                (": 8", ": -8", "input_length must be a number from 0 to 2^53, not -8"),
                (": 9", ": 0.5", "output_length must be an integer, not 0.5"),
                ("[3]", '"a"', "hash_ids must be a list of integers"),
                ("[3]", '["a"]', "hash_ids must be a list of integers"),
            )
        ),
    ],
)
def test_a_trace_that_is_none_is_one_line(written: str | None, fault: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    if written is not None:
        trace.write_text(written)
    result = CliRunner().invoke(app, ["simulate", str(trace)])
    assert result.exit_code == 1
    assert result.stderr == f"baton: {fault.replace('{}', str(trace), 1)}\n"


@pytest.mark.parametrize("loads", ["", "1,x", "0", "1,-1", "nan", "1,inf"])
def test_loads_to_simulate_are_above_0(loads: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(TRACE_LINE)
    result = CliRunner().invoke(app, ["simulate", str(trace), "--load", loads])
    assert result.exit_code == 1
    assert result.stderr.startswith("baton: --load must be numbers above 0, as in 1,2,0.5; not")


@pytest.mark.parametrize("flag", ["--minutes", "--ttft-slo", "--itl-slo"])
@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf"])
def test_a_time_to_simulate_is_above_0(flag: str, value: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(TRACE_LINE)
    result = CliRunner().invoke(app, ["simulate", str(trace), flag, value])
    assert result.exit_code == 1
    assert result.stderr == f"baton: {flag} must be a number above 0, not {value}\n"


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        (["why", "--jsn"], "--json"),
        (["serve", "--prefil", "2"], "--prefill"),
        (["sttus"], "status"),
    ],
)
def test_a_misspelling_names_the_right_word(wrong: list[str], right: str) -> None:
    said = CliRunner().invoke(app, wrong, env={"COLUMNS": "160"})
    assert said.exit_code == 2
    assert right in said.stderr


def test_shell_completion_knows_the_commands() -> None:
    variables = {"_BATON_COMPLETE": "complete_bash", "COMP_WORDS": "baton di", "COMP_CWORD": "1"}
    told = CliRunner().invoke(app, [], env=variables, prog_name="baton")
    assert "diagnose" in told.stdout


def commands(group: TyperGroup, path: str = "baton") -> Iterator[tuple[str, TyperCommand]]:
    for name, command in group.commands.items():
        if isinstance(command, TyperGroup):
            yield from commands(command, f"{path} {name}")
        else:
            yield f"{path} {name}", command


def test_every_command_with_output_has_a_json_flag() -> None:
    root = get_command(app)
    assert isinstance(root, TyperGroup)
    flags = {
        path: {flag for parameter in command.params for flag in parameter.opts}
        for path, command in commands(root)
    }
    assert {path for path in flags if "--json" not in flags[path]} == WITHOUT_JSON
