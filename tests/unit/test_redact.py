"""Internal errors as callers see them."""

from __future__ import annotations

import pytest

from baton.core.errors import BatonError, Internal, InvalidRequest, Unavailable, WorkerLost
from baton.rpc import redact, redact_error

SECRETS = [
    "10.0.0.7:50051",
    "10.0.0.7",
    "ipv4:127.0.0.1:50051",
    "ipv6:%5B::1%5D:50051",
    "unix:/tmp/baton/notes.sock",
    "[::1]:50051",
    "[fe80::1%eth0]:80",
    "gpu-7.rack.local:50051",
    "localhost:8000",
    "/models/tiny/config.json",
    "~/models/tiny/",
    "0x7f12ab34cd56",
]


@pytest.mark.parametrize("secret", SECRETS)
def test_addresses_and_paths_are_redacted(secret: str) -> None:
    for text in (f"cannot reach {secret}", f"'{secret}' is gone", f"({secret}): it failed"):
        assert secret not in redact(text)
        assert redact(text) == text.replace(secret, "…")


@pytest.mark.parametrize(
    "text",
    [
        "worker decode-0 was lost: it has not answered for 3 seconds",
        "2 workers were lost while they ran this request; the last: it stalled",
        "prefill-0 has page_size 16, decode-0 has page_size 32",
        "no token within 0.5 seconds",
        "9/10 of 3.5 GiB, at 12:30 and/or later",
        "version 2.60.0 of 1.5.1",
    ],
)
def test_other_text_is_unchanged(text: str) -> None:
    assert redact(text) == text


@pytest.mark.parametrize("kind", [Internal, Unavailable, WorkerLost])
def test_a_redacted_error_keeps_its_class(kind: type[BatonError]) -> None:
    error = redact_error(kind("no answer from 10.0.0.7:50051", retry_after=2.0))
    assert (type(error), error.message, error.retry_after) == (kind, "no answer from …", 2.0)


def test_a_callers_mistake_is_not_redacted() -> None:
    error = InvalidRequest("there is no model '/models/tiny' here", field="model")
    assert redact_error(error) is error
