"""`baton generate` and `baton chat` against a real gRPC server."""

from __future__ import annotations

import json
import os
import subprocess

import pytest
from command_line import BATON, Terminal, run
from scripted_router import ScriptedRouter

from baton.core.errors import PromptTooLong

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


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
@pytest.mark.parametrize("command", [["chat"], ["generate", "-"], ["generate", "--raw"]])
def test_a_prompt_that_is_no_utf_8_is_named(
    router: ScriptedRouter, command: list[str], errors: str
) -> None:
    ran = subprocess.run(
        [*BATON, *command, "--address", router.address],
        input=b"ab\xff",
        env=os.environ | {"PYTHONIOENCODING": f"utf-8:{errors}"},
        capture_output=True,
        check=False,
    )
    assert ran.returncode == 1
    assert ran.stderr == (
        b"baton: a text cannot be written in UTF-8: surrogates not allowed at character 2\n"
    )


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


def test_json_has_the_whole_answer_and_its_times(router: ScriptedRouter) -> None:
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
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
            "response_cache": "",
            "response_age": 0.0,
            "response_similarity": 0.0,
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


def test_a_chat_keeps_its_history(router: ScriptedRouter) -> None:
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
