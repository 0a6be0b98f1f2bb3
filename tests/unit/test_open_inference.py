"""The Open Inference Protocol on a router in front of workers that answer at once."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator

import grpc
import pytest
from front_door import front_door_beside
from hypothesis import given, settings
from hypothesis import strategies as st
from proto_strategies import messages

from baton.core.errors import InvalidRequest
from baton.core.model_store import EMBEDDED_NAME
from baton.router.edges.grpc.open_tensors import INPUTS, InferCall
from baton.router.edges.grpc.protobuf import parse_request
from baton.v1 import open_inference_pb2 as oip
from baton.v1.open_inference_pb2_grpc import GRPCInferenceServiceStub

Tensor = oip.ModelInferRequest.InferInputTensor


def tensor(name: str, value: object) -> Tensor:
    made = Tensor(name=name, shape=[1])
    match value:
        case bool():
            made.datatype = "BOOL"
            made.contents.bool_contents.append(value)
        case int():
            made.datatype = "INT32"
            made.contents.int_contents.append(value)
        case float():
            made.datatype = "FP32"
            made.contents.fp32_contents.append(value)
        case _:
            text = value if isinstance(value, str) else json.dumps(value)
            made.datatype = "BYTES"
            made.contents.bytes_contents.append(text.encode())
    return made


def request(**inputs: object) -> oip.ModelInferRequest:
    given = {"text_input": "Hello", **inputs}
    tensors = [tensor(name, value) for name, value in given.items() if value is not None]
    return oip.ModelInferRequest(model_name=EMBEDDED_NAME, id="r", inputs=tensors)


def test_sampling_comes_in_three_ways() -> None:
    texts = {"temperature": "0.5", "max_tokens": "7", "top_k": -1, "stop": "x", "seed": 2**63}
    message = InferCall.parse(request(sampling_parameters=texts)).message
    assert (message.sampling.temperature, message.sampling.top_k) == (0.5, 0)
    assert (message.max_tokens, list(message.stop), message.sampling.seed) == (7, ["x"], 2**63)
    message = InferCall.parse(request(max_tokens=5, temperature=0.5, random_seed=3)).message
    assert (message.max_tokens, message.sampling.temperature, message.sampling.seed) == (5, 0.5, 3)
    by_parameters = request()
    by_parameters.parameters["max_tokens"].int64_param = 9
    by_parameters.parameters["triton_enable_empty_final_response"].bool_param = True
    assert InferCall.parse(by_parameters).message.max_tokens == 9


def test_raw_contents_are_the_elements_of_all_inputs() -> None:
    text = "日本".encode()
    raw = oip.ModelInferRequest(
        inputs=[
            Tensor(name="text_input", datatype="BYTES", shape=[1]),
            Tensor(name="stream", datatype="BOOL", shape=[1]),
            Tensor(name="max_tokens", datatype="INT32", shape=[1, 1]),
        ],
        raw_input_contents=[struct.pack("<I", len(text)) + text, b"\1", struct.pack("<i", 4)],
    )
    call = InferCall.parse(raw)
    assert (call.message.text, call.message.max_tokens, call.stream) == ("日本", 4, True)
    raw.raw_input_contents.pop()
    with pytest.raises(InvalidRequest, match="2 entries for 3 inputs"):
        InferCall.parse(raw)


@pytest.mark.parametrize(
    ("inputs", "field"),
    [
        ({"text_input": None}, "text_input"),
        ({"text_input": 3}, "text_input"),
        ({"stream": True, "exclude_input_in_output": False}, "exclude_input_in_output"),
        ({"stream": True, "n": 2}, "n"),
        ({"sampling_parameters": "[1"}, "sampling_parameters"),
        ({"sampling_parameters": [1]}, "sampling_parameters"),
        ({"sampling_parameters": {"temperature": "hot"}}, "temperature"),
        ({"sampling_parameters": {"max_tokens": -1}}, "max_tokens"),
        ({"sampling_parameters": {"use_beam_search": True}}, "use_beam_search"),
        ({"return_logprobs": True}, "return_logprobs"),
        ({"image": "x"}, "image"),
    ],
)
def test_wrong_inputs_are_named(inputs: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        InferCall.parse(request(**inputs))
    assert refused.value.field == field


@pytest.mark.parametrize(
    "wrong",
    [
        Tensor(name="stream", datatype="BOOL"),
        Tensor(name="stream", datatype="FP16"),
        Tensor(
            name="stream",
            datatype="BYTES",
            contents=oip.InferTensorContents(bytes_contents=[b"\xff"]),
        ),
    ],
)
def test_a_tensor_has_one_element_of_its_type(wrong: Tensor) -> None:
    asked = request()
    asked.inputs.append(wrong)
    with pytest.raises(InvalidRequest, match="stream must have one element"):
        InferCall.parse(asked)


JSON_VALUES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
FIELDS = st.sampled_from(
    ["temperature", "top_k", "seed", "max_tokens", "n", "stop", "stop_token_ids", "logit_bias",
     "ignore_eos", "priority", "json_schema", "min_tokens", "cache_salt"]
)  # fmt: skip


@given(st.dictionaries(FIELDS, JSON_VALUES | st.lists(JSON_VALUES, max_size=2), max_size=4))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_sampling_parameters_are_parsed_or_refused_with_their_field(
    fields: dict[str, object],
) -> None:
    try:
        parse_request(InferCall.parse(request(sampling_parameters=fields)).message)
    except InvalidRequest as refused:
        assert refused.field.removeprefix("sampling.") in fields  # noqa: PT017


@given(st.sampled_from([*INPUTS, "max_tokens"]), messages(Tensor.DESCRIPTOR), st.binary(max_size=9))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_any_tensor_is_parsed_or_refused(name: str, made: Tensor, raw: bytes) -> None:
    made.name = name
    asked = oip.ModelInferRequest(inputs=[made], raw_input_contents=[raw] if raw else [])
    try:
        InferCall.parse(asked)
    except InvalidRequest as refused:
        assert refused.field  # noqa: PT017


@pytest.fixture(scope="module")
def stub() -> Iterator[GRPCInferenceServiceStub]:
    with front_door_beside() as door, grpc.insecure_channel(door.address) as channel:
        yield GRPCInferenceServiceStub(channel)


def outputs(response: oip.ModelInferResponse) -> dict[str, list[object]]:
    assert (response.model_name, response.id) == (EMBEDDED_NAME, "r")
    return {
        each.name: [*each.contents.bytes_contents, *each.contents.uint_contents]
        for each in response.outputs
    }


def test_server_and_model_are_described(stub: GRPCInferenceServiceStub) -> None:
    assert stub.ServerLive(oip.ServerLiveRequest()).live
    assert stub.ServerReady(oip.ServerReadyRequest()).ready
    assert stub.ModelReady(oip.ModelReadyRequest(name=EMBEDDED_NAME, version="1")).ready
    assert stub.ServerMetadata(oip.ServerMetadataRequest()).name == "baton"
    model = stub.ModelMetadata(oip.ModelMetadataRequest(name=EMBEDDED_NAME))
    assert model.inputs[0].name == "text_input"
    assert [each.name for each in model.outputs][:2] == ["text_output", "finish_reason"]
    for wrong in ({"name": "other"}, {"name": EMBEDDED_NAME, "version": "2"}):
        with pytest.raises(grpc.RpcError) as refused:
            stub.ModelReady(oip.ModelReadyRequest(**wrong))
        assert refused.value.code() is grpc.StatusCode.NOT_FOUND


def test_an_answer_comes_as_a_whole(stub: GRPCInferenceServiceStub) -> None:
    asked = request(
        max_tokens=4,
        return_finish_reason=True,
        return_num_input_tokens=True,
        return_num_output_tokens=True,
    )
    assert outputs(stub.ModelInfer(asked)) == {
        "text_output": [b"Helloaaaa"],
        "finish_reason": [b"length"],
        "num_input_tokens": [1],
        "num_output_tokens": [4],
    }
    several = request(sampling_parameters={"max_tokens": 2, "n": 3}, exclude_input_in_output=True)
    assert outputs(stub.ModelInfer(several)) == {"text_output": [b"aa"] * 3}
    for wrong in (request(stream=True), request(sampling_parameters={"temperature": 9})):
        with pytest.raises(grpc.RpcError) as refused:
            stub.ModelInfer(wrong)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_raw_contents_are_answered_with_such(stub: GRPCInferenceServiceStub) -> None:
    asked = request(max_tokens=2, return_num_output_tokens=True)
    for each in asked.inputs:
        each.ClearField("contents")
    asked.raw_input_contents.extend([b"\5\0\0\0Hello", struct.pack("<i", 2), b"\1"])
    response = stub.ModelInfer(asked)
    assert [each.name for each in response.outputs] == ["text_output", "num_output_tokens"]
    assert not any(each.HasField("contents") for each in response.outputs)
    assert response.raw_output_contents == [b"\7\0\0\0Helloaa", b"\2\0\0\0"]


def test_a_stream_has_many_requests_and_outlives_their_errors(
    stub: GRPCInferenceServiceStub,
) -> None:
    asked = [
        request(stream=True, max_tokens=5),
        request(max_tokens=3, exclude_input_in_output=True),
        request(sampling_parameters={"temperature": 9}),
    ]
    for index, each in enumerate(asked):
        each.id = str(index)
    texts, finals, errors = ["", ""], [0, 0], []
    for message in stub.ModelStreamInfer(iter(asked)):
        response = message.infer_response
        if message.error_message:
            errors.append((response.id, message.error_message))
            continue
        (output,) = response.outputs
        texts[int(response.id)] += output.contents.bytes_contents[0].decode()
        finals[int(response.id)] += response.parameters["triton_final_response"].bool_param
    assert (texts, finals) == (["aaaaa", "aaa"], [1, 1])
    ((failed, why),) = errors
    assert (failed, "temperature" in why) == ("2", True)
