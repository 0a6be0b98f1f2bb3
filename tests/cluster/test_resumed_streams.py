"""Two routers of the same workers: a client whose router is killed resumes its stream at the
other."""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path
from typing import Any

import pytest
from processes import ProcessCluster

from baton import Client, InvalidRequest, Unavailable

SIZES = {"kv_memory": "16MiB", "threads": 1}
PROMPT = [7, 3, 9, 4, 1]
OPTIONS: list[dict[str, Any]] = [
    {"max_tokens": 200, "ignore_eos": True},
    {"max_tokens": 200, "ignore_eos": True, "temperature": 1.0, "repetition_penalty": 1.2},
    {"max_tokens": 100, "ignore_eos": True, "temperature": 1.0, "logprobs": 2},
]


def test_a_stream_continues_at_the_other_router(tiny: Path, tmp_path: Path) -> None:
    with ProcessCluster(tiny, tmp_path, tree={"prefill": SIZES, "decode": SIZES}) as cluster:
        first, address = cluster.router, cluster.address
        cluster.start_router()
        with Client(address) as client, cluster.client() as other:
            streams = [client.stream(PROMPT, **options) for options in OPTIONS]
            for stream in streams:
                for _ in range(5):
                    next(stream)
            first.send(signal.SIGKILL)
            for stream, options in zip(streams, OPTIONS, strict=True):
                # Unless all of it had come already.
                with contextlib.suppress(Unavailable):
                    stream.read()
                answer = other.resume(stream).read()
                whole = other.generate(PROMPT, seed=answer.seed, **options)
                assert answer.token_ids == whole.token_ids
                assert answer.text == whole.text
                assert answer.usage.completion_tokens == whole.usage.completion_tokens
                assert len(answer.logprobs) == len(whole.logprobs)
        first.wait()
        cluster.wait_idle()


def test_tokens_outside_the_structure_are_refused(idle: ProcessCluster) -> None:
    with idle.client() as client:
        stream = client.stream("A number: ", regex="[0-9]{3}", max_tokens=8)
        assert len(stream.read().text) == 3
        request = stream._resumed()
        request.resumed_token_ids[:] = client.tokenize("word").token_ids
        with pytest.raises(InvalidRequest, match="do not match"):
            client._stream(request, None).read()
