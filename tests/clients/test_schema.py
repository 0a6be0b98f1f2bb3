"""Schemathesis reads our own OpenAPI document, and calls whatever it can think of."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import schemathesis
from front_door import front_door_beside
from hypothesis import settings
from openapi_document import document
from schemathesis.specs.openapi.checks import negative_data_rejection, positive_data_acceptance

from bench import instant_worker

# No schema can say which regular expressions, grammars and JSON Schemas are sound, which token ids
# the model knows, what goes together, such as stream_options and stream, what is a time, and which
# adapters and models there are.
EXCLUDED = {
    path: [positive_data_acceptance]
    for path in (
        "/v1/chat/completions",
        "/v1/batches",
        "/v1/completions",
        "/v1/embeddings",
        "/v1/messages",
        "/v1/responses",
        "/v1/responses/input_tokens",
        "/v1/messages/count_tokens",
        "/tokenize",
        "/detokenize",
        "/v1/load_lora_adapter",
        "/v1/models/load",
        "/v1/models/unload",
    )
}
# In a form, an empty list in place of a number is nothing.
EXCLUDED["/v1/files"] = [negative_data_rejection]

# A body with a text that is far too long is refused for its size, with 413.
REFUSALS = ["400", "401", "403", "404", "405", "406", "409", "413", "415", "422", "428", "429"]
CONFIG = schemathesis.Config.from_dict(
    {"checks": {"negative_data_rejection": {"expected-statuses": [*REFUSALS, "5xx"]}}}
)

api = schemathesis.openapi.from_dict(document(), config=CONFIG)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    kept = {"folder": str(tmp_path_factory.mktemp("batches"))}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(instant_worker, "CONTEXT_LENGTH", 256)  # answers as long as that take long
        with front_door_beside({"batches": kept}) as door:
            yield f"http://{door.http_address}"


@api.parametrize()
@settings(max_examples=25, deadline=None)
def test_every_answer_is_as_the_document_says(case: schemathesis.Case, url: str) -> None:
    case.call_and_validate(base_url=url, excluded_checks=EXCLUDED.get(case.operation.path, ()))
