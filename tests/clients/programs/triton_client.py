# pip: tritonclient[grpc] numpy
"""Triton's client over gRPC: whole, and in a stream. Prints an answer a line."""

import json
import queue
import sys
import urllib.request

import numpy as np
import tritonclient.grpc as triton

address, model, grpc_address = sys.argv[1:4]
messages = [{"role": "user", "content": "What is the capital of France?"}]
tokenize = urllib.request.Request(
    f"{address}/tokenize",
    json.dumps({"messages": messages}).encode(),
    {"content-type": "application/json"},
)
with urllib.request.urlopen(tokenize) as answer:
    prompt = json.load(answer)["rendered"]


def inputs(stream: bool) -> list[triton.InferInput]:
    sampling = json.dumps({"temperature": "0", "max_tokens": "30"})
    made = []
    for name, kind, value in (
        ("text_input", "BYTES", prompt.encode()),
        ("sampling_parameters", "BYTES", sampling.encode()),
        ("stream", "BOOL", stream),
        ("exclude_input_in_output", "BOOL", True),
    ):
        made.append(triton.InferInput(name, [1], kind))
        made[-1].set_data_from_numpy(np.array([value], dtype=bool if kind == "BOOL" else object))
    return made


with triton.InferenceServerClient(grpc_address) as client:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready(model)
    assert client.get_server_metadata().name == "baton"
    assert client.get_model_metadata(model).inputs[0].name == "text_input"
    print(client.infer(model, inputs(False)).as_numpy("text_output")[0].decode())
    found: queue.Queue[tuple[triton.InferResult, Exception | None]] = queue.Queue()
    client.start_stream(lambda result, error: found.put((result, error)))
    client.async_stream_infer(model, inputs(True), enable_empty_final_response=True)
    text, last = "", False
    while not last:
        result, error = found.get(timeout=60)
        if error:
            raise error
        text += result.as_numpy("text_output")[0].decode()
        last = result.get_response().parameters["triton_final_response"].bool_param
    client.stop_stream()
    print(text)
