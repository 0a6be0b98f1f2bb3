"""The Open Inference Protocol on a real cluster, with the generated stubs."""

from __future__ import annotations

import json

import grpc
from processes import ProcessCluster

from baton.v1 import open_inference_pb2 as oip
from baton.v1.open_inference_pb2_grpc import GRPCInferenceServiceStub

PROMPT = "The capital of France is"


def request(*, stream: bool) -> oip.ModelInferRequest:
    asked = oip.ModelInferRequest(model_name="shallow")
    sampling = json.dumps({"temperature": "0", "max_tokens": 12})
    for name, value in (("text_input", PROMPT), ("sampling_parameters", sampling)):
        tensor = asked.inputs.add(name=name, datatype="BYTES", shape=[1])
        tensor.contents.bytes_contents.append(value.encode())
    tensor = asked.inputs.add(name="stream", datatype="BOOL", shape=[1])
    tensor.contents.bool_contents.append(stream)
    return asked


def text(response: oip.ModelInferResponse) -> str:
    return response.outputs[0].contents.bytes_contents[0].decode()


def test_answers_are_those_of_the_other_apis(shallow_idle: ProcessCluster) -> None:
    with shallow_idle.client() as client:
        expected = client.generate(PROMPT, max_tokens=12, temperature=0.0).text
    with grpc.insecure_channel(shallow_idle.address) as channel:
        stub = GRPCInferenceServiceStub(channel)
        assert stub.ServerReady(oip.ServerReadyRequest()).ready
        assert text(stub.ModelInfer(request(stream=False))) == PROMPT + expected
        found = [
            each.infer_response for each in stub.ModelStreamInfer(iter([request(stream=True)]))
        ]
    assert "".join(map(text, found)) == expected
    assert len(found) > 3


def test_a_stream_that_is_cut_off_leaves_nothing_behind(shallow_idle: ProcessCluster) -> None:
    asked = request(stream=True)
    asked.inputs[1].contents.bytes_contents[0] = b'{"ignore_eos": true}'
    with grpc.insecure_channel(shallow_idle.address) as channel:
        stream = GRPCInferenceServiceStub(channel).ModelStreamInfer(iter([asked]))
        assert text(next(stream).infer_response)
        stream.cancel()
    # `shallow_idle` waits until the workers have nothing left.
