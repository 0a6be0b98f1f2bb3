"""Schemathesis reads our own OpenAPI document, and calls whatever it can think of."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import schemathesis
from front_door import front_door_beside
from hypothesis import settings
from schemathesis.specs.openapi.checks import (
    negative_data_rejection,
    positive_data_acceptance,
)

from router.http.openapi import document

api = schemathesis.openapi.from_dict(document())


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with front_door_beside() as door:
        yield f"http://{door.http_address}"


@api.parametrize()
@settings(max_examples=25, deadline=None)
def test_every_answer_is_as_the_document_says(case: schemathesis.Case, url: str) -> None:
    # What goes together, such as stream_options and stream, is told in words and not in schemas;
    # and where a field has no meaning, such as calls of tools that a system made, it is not read.
    case.call_and_validate(
        base_url=url, excluded_checks=[positive_data_acceptance, negative_data_rejection]
    )
