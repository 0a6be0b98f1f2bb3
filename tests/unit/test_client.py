"""The client against a real gRPC server."""

from __future__ import annotations

import math
import os
import signal
import threading
from functools import partial

import pytest
from scripted_router import ScriptedRouter

from baton import (
    Answer,
    Cancelled,
    Choice,
    Client,
    DeadlineExceeded,
    Delta,
    Exhausted,
    FinishReason,
    Internal,
    InvalidRequest,
    Message,
    Placement,
    Unavailable,
    Usage,
)
from baton.v1 import inference_pb2

# What goes out.


def test_every_option_reaches_the_router(client: Client, router: ScriptedRouter) -> None:
    client.generate(
        "hello",
        model="tale",
        max_tokens=64,
        temperature=0.5,
        top_k=40,
        top_p=0.75,
        min_p=0.125,
        repetition_penalty=1.5,
        presence_penalty=0.25,
        frequency_penalty=-0.25,
        seed=2**64 - 1,
        stop=["\n\n", "END"],
        stop_token_ids=[5, 6],
        ignore_eos=True,
        request_id="mine",
        n=2,
        cache_salt="ours",
        cache_ttl=300,
        priority=5,
        prediction="hello again",
        timeout=30,
    )
    assert router.requests == [
        inference_pb2.GenerateRequest(
            model="tale",
            text="hello",
            sampling=inference_pb2.SamplingParameters(
                temperature=0.5,
                top_k=40,
                top_p=0.75,
                min_p=0.125,
                repetition_penalty=1.5,
                presence_penalty=0.25,
                frequency_penalty=-0.25,
                seed=2**64 - 1,
            ),
            max_tokens=64,
            stop_token_ids=[5, 6],
            stop=["\n\n", "END"],
            ignore_eos=True,
            request_id="mine",
            n=2,
            cache_salt="ours",
            cache_hint=inference_pb2.CacheHint(ttl_seconds=300),
            priority=5,
            prediction="hello again",
        )
    ]


def test_an_option_of_none_is_unset_on_the_wire(client: Client, router: ScriptedRouter) -> None:
    client.generate("hello", max_tokens=None, temperature=None, seed=None, stop=None)
    [request] = router.requests
    assert not request.HasField("max_tokens")
    assert [field.name for field, _ in request.sampling.ListFields()] == []


def test_an_option_of_zero_is_set_on_the_wire(client: Client, router: ScriptedRouter) -> None:
    client.generate("hello", temperature=0.0, seed=0)
    [request] = router.requests
    assert request.sampling.HasField("temperature")
    assert request.sampling.HasField("seed")


def test_one_stop_string_is_not_taken_apart(client: Client, router: ScriptedRouter) -> None:
    client.generate("hello", stop="END")
    assert router.requests[0].stop == ["END"]


def test_token_ids_are_sent_as_they_are(client: Client, router: ScriptedRouter) -> None:
    client.generate([1, 2, 3])
    assert router.requests[0].token_ids.ids == [1, 2, 3]


def test_an_empty_prompt_keeps_its_kind(client: Client, router: ScriptedRouter) -> None:
    client.generate("")
    client.generate([])
    assert [request.WhichOneof("prompt") for request in router.requests] == ["text", "token_ids"]


def test_a_message_may_be_a_dict_a_pair_or_a_message(
    client: Client, router: ScriptedRouter
) -> None:
    client.chat(
        [{"role": "system", "content": "a"}, ("user", "b"), Message("assistant", "c")], seed=1
    )
    [request] = router.requests
    said = [(message.role, message.content) for message in request.chat.messages]
    assert said == [("system", "a"), ("user", "b"), ("assistant", "c")]
    assert request.sampling.seed == 1


@pytest.mark.parametrize(
    "message",
    ["hi", {"role": "user"}, {"role": "user", "content": "hi", "nam": "x"}, ("a", "b", "c"), 3],
)
def test_anything_else_is_no_message(client: Client, message: object) -> None:
    with pytest.raises(TypeError):
        client.chat([message])  # type: ignore[list-item]


def test_an_unknown_option_is_a_type_error(client: Client) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'temprature'"):
        client.generate("hello", temprature=0.5)  # type: ignore[call-arg]


@pytest.mark.parametrize("option", ["max_tokens", "top_k", "seed"])
def test_a_number_that_no_field_holds_is_an_invalid_request(client: Client, option: str) -> None:
    with pytest.raises(InvalidRequest):
        client.generate("hello", **{option: -1})  # type: ignore[arg-type]


def test_a_prompt_of_many_mebibytes_passes(client: Client, router: ScriptedRouter) -> None:
    client.generate("x" * (20 << 20))
    assert len(router.requests[0].text) == 20 << 20


# What comes back.


def test_an_answer_holds_all_of_the_routers_response(client: Client) -> None:
    answer = client.generate("hello", request_id="mine", seed=3)
    placements = (Placement("prefill-0", "decode-0", "split", "least loaded", "least_loaded", 0.5),)
    assert answer == Answer(
        text="Once upon a time",
        token_ids=(0, 1, 2),
        finish_reason=FinishReason.STOP,
        stop="\n\n",
        usage=Usage(prompt_tokens=4, completion_tokens=3, cached_tokens=2),
        request_id="mine",
        model="tale",
        seed=3,
        prefill_worker="prefill-0",
        decode_worker="decode-0",
        placements=placements,
        choices=(
            Choice(0, "Once upon a time", (0, 1, 2), FinishReason.STOP, "\n\n", 3, placements),
        ),
    )


def test_several_answers_are_choices_and_counted_together(client: Client) -> None:
    with client.stream("hello", n=3, seed=5) as stream:
        deltas = list(stream)
        answer = stream.answer
    assert [delta.text for delta in deltas if delta.index == 2] == ["Once", " upon", " a time"]
    assert len(deltas) == 9
    assert [choice.text for choice in answer.choices] == ["Once upon a time"] * 3
    assert [choice.seed for choice in answer.choices] == [5, 6, 7]
    assert answer.text == answer.choices[0].text
    assert answer.usage == Usage(prompt_tokens=4, completion_tokens=9, cached_tokens=2)


def test_a_stream_gives_each_piece_and_then_the_answer(client: Client) -> None:
    with client.stream("hello") as stream:
        assert list(stream) == [Delta("Once", (0,)), Delta(" upon", (1,)), Delta(" a time", (2,))]
        assert stream.answer.text == "Once upon a time"


def test_a_chat_can_be_streamed(client: Client, router: ScriptedRouter) -> None:
    with client.stream_chat([("user", "hi")]) as stream:
        assert stream.read().text == "Once upon a time"
    assert router.requests[0].chat.messages[0].content == "hi"


def test_an_answer_is_not_there_before_its_end(client: Client) -> None:
    with client.stream("hello") as stream:
        next(stream)
        with pytest.raises(RuntimeError, match="not complete"):
            _ = stream.answer


def test_the_end_of_a_stream_stays_its_end(client: Client, router: ScriptedRouter) -> None:
    with client.stream("hello") as stream:
        assert len(list(stream)) == 3
        assert list(stream) == []
    router.error = Exhausted("full")
    with client.stream("hello") as stream:
        for _ in range(2):
            with pytest.raises(Exhausted):
                stream.read()


def test_a_stream_that_ends_without_finished_is_an_error(
    client: Client, router: ScriptedRouter
) -> None:
    router.unfinished = True
    with pytest.raises(Internal, match="before the end"):
        client.generate("hello")


def test_models_names_what_is_served(client: Client) -> None:
    assert [(model.name, model.has_chat_template) for model in client.models()] == [("tale", True)]


def test_text_survives_tokenize_and_detokenize(client: Client) -> None:
    assert client.detokenize(client.tokenize("héllo").token_ids) == "héllo"


def test_tokenizing_a_chat_shows_how_it_was_rendered(client: Client) -> None:
    assert client.tokenize([("user", "hi")]).rendered == "<user>hi"


def test_status_is_the_routers_own(client: Client, router: ScriptedRouter) -> None:
    assert client.status() == router.status


# Going away early.


def test_leaving_the_block_early_cancels_the_request(
    client: Client, router: ScriptedRouter
) -> None:
    router.hang = True
    with client.stream("hello") as stream:
        next(stream)
    assert router.over.wait(5)


def test_iterating_a_cancelled_stream_raises_cancelled(
    client: Client, router: ScriptedRouter
) -> None:
    router.hang = True
    with client.stream("hello") as stream:
        threading.Timer(0.1, stream.cancel).start()
        with pytest.raises(Cancelled):
            stream.read()
    assert router.over.wait(5)


def test_dropping_a_stream_cancels_the_request(client: Client, router: ScriptedRouter) -> None:
    router.hang = True
    next(client.stream("hello"))
    assert router.over.wait(5)


def test_an_interrupt_leaves_the_client_usable(client: Client, router: ScriptedRouter) -> None:
    router.hang = True
    with client.stream("hello") as stream:
        next(stream)
        threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            stream.read()
    router.hang = False
    assert client.generate("hello", timeout=5).text == "Once upon a time"


def test_closing_the_client_cancels_running_calls(router: ScriptedRouter) -> None:
    router.hang = True
    with Client(router.address) as client:
        stream = client.stream("hello")
        next(stream)
    assert router.over.wait(5)


def test_a_closed_client_says_so_whether_it_was_used_or_not(router: ScriptedRouter) -> None:
    used, unused = Client(router.address), Client(router.address)
    used.status()
    for client in (used, unused):
        client.close()
        for call in (client.status, client.wait_ready, partial(client.generate, "hello")):
            with pytest.raises(Unavailable, match="this client is closed"):
                call()


def test_a_fork_needs_a_client_of_its_own(client: Client, router: ScriptedRouter) -> None:
    client.status()
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        try:
            client.generate("hello", timeout=5)
        except Unavailable as error:
            os.write(writing, error.message.encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert b"before a fork" in os.read(reading, 200)
    os.close(reading)
    os.close(writing)
    assert client.generate("hello").text == "Once upon a time"


def test_a_timeout_may_be_endless_but_no_nonsense(client: Client) -> None:
    for timeout in (math.inf, 1e12):
        assert client.generate("hello", timeout=timeout).text == "Once upon a time"
        client.status(timeout=timeout)
    with pytest.raises(InvalidRequest, match="timeout is no number"):
        client.generate("hello", timeout=math.nan)


@pytest.mark.parametrize("key", ["a\nb", "schlüssel"])
def test_a_key_that_no_header_can_hold_is_refused(router: ScriptedRouter, key: str) -> None:
    with pytest.raises(InvalidRequest, match="printable ASCII"):
        Client(router.address, api_key=key)


def test_a_number_that_does_not_fit_its_field_is_refused(client: Client) -> None:
    for call in (lambda: client.scale(prefill=-1), lambda: client.recent(-1)):
        with pytest.raises(InvalidRequest, match="does not fit its field"):
            call()


def test_a_stream_may_be_read_on_beside_the_one_that_resumed_it(
    client: Client, router: ScriptedRouter
) -> None:
    old = client.stream("hello")
    next(old)
    router.pieces = [" upon", " a time"]
    new = client.resume(old)
    assert [next(old).text, next(new).text] == [" upon", " upon"]
    assert (old.read().text, new.read().text) == ("Once upon a time", "Once upon a time")


def test_a_cluster_that_is_not_there_is_unavailable_by_its_address(closed_port: int) -> None:
    address = f"127.0.0.1:{closed_port}"
    with Client(address) as client, pytest.raises(Unavailable, match=address):
        client.generate("hello")


def test_an_answer_that_takes_too_long_is_deadline_exceeded(
    client: Client, router: ScriptedRouter
) -> None:
    router.hang = True
    with pytest.raises(DeadlineExceeded, match=router.address):
        client.generate("hello", timeout=0.2)
    assert router.over.wait(5)


# Waiting for a cluster.


def test_a_connected_pair_is_ready(client: Client) -> None:
    client.wait_ready(timeout=5)


def test_a_router_that_starts_late_is_waited_for(closed_port: int) -> None:
    started: list[ScriptedRouter] = []
    starter = threading.Timer(0.5, lambda: started.append(ScriptedRouter(closed_port)))
    starter.start()
    with Client(f"127.0.0.1:{closed_port}") as client:
        client.wait_ready(timeout=10)
    starter.join()
    started[0].stop()


def test_the_end_of_a_wait_names_what_is_missing(client: Client, router: ScriptedRouter) -> None:
    router.status.workers[0].attached = False
    with pytest.raises(DeadlineExceeded, match="no prefill worker"):
        client.wait_ready(timeout=0.3)
    router.status.workers[0].attached = True
    router.status.workers[0].ClearField("connected")
    with pytest.raises(DeadlineExceeded, match="is connected to a decode worker"):
        client.wait_ready(timeout=0.3)
    router.status.workers[1].fault = "leaks pages"
    with pytest.raises(DeadlineExceeded, match="no decode worker"):
        client.wait_ready(timeout=0.3)


def test_a_router_that_never_starts_ends_the_wait(closed_port: int) -> None:
    with (
        Client(f"127.0.0.1:{closed_port}") as client,
        pytest.raises(DeadlineExceeded, match="no Baton router answers"),
    ):
        client.wait_ready(timeout=0.3)
