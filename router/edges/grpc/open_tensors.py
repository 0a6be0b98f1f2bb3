"""Tensors of the Open Inference Protocol: a ModelInferRequest becomes a GenerateRequest.

Inputs have the names that Triton's backends for language models give them. Sampling parameters come
from the input `sampling_parameters` (a JSON object with vLLM's field names), from inputs of one
number each (as for TensorRT-LLM), or from the request's parameters.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from google.protobuf.json_format import ParseDict, ParseError

from baton.core.errors import InvalidRequest, NotServed
from baton.v1 import inference_pb2 as pb
from baton.v1 import open_inference_pb2 as oip

Scalar = str | bool | int | float

# Datatype: (field of its elements, struct format of a raw element).
_NUMBERS = {
    "BOOL": ("bool_contents", "<?"),
    "INT32": ("int_contents", "<i"),
    "INT64": ("int64_contents", "<q"),
    "UINT32": ("uint_contents", "<I"),
    "UINT64": ("uint64_contents", "<Q"),
    "FP32": ("fp32_contents", "<f"),
    "FP64": ("fp64_contents", "<d"),
}
_SAMPLING = {field.name for field in pb.SamplingParameters.DESCRIPTOR.fields} - {
    *("suppress_tokens", "begin_suppress_tokens", "bad_words_ids"),
}
_OTHERS = {
    *("max_tokens", "stop", "stop_token_ids", "ignore_eos", "n", "cache_salt", "priority"),
    *("json_schema", "regex", "grammar"),
}
_RENAMED = {"random_seed": "seed", "stop_words": "stop"}
# Prefixes of the protocol's own parameters, which are ignored.
_PROTOCOL = ("triton_", "sequence_", "binary_data_output", "timeout")
# Inputs that request an output, and the output.
_WANTED = {
    "return_finish_reason": "finish_reason",
    "return_num_input_tokens": "num_input_tokens",
    "return_num_output_tokens": "num_output_tokens",
}
_UNSERVED = ("return_logprobs", "return_cumulative_logprob", "image")

INPUTS = {
    "text_input": "BYTES",
    "stream": "BOOL",
    "sampling_parameters": "BYTES",
    **dict.fromkeys(("exclude_input_in_output", *_WANTED), "BOOL"),
}
OUTPUTS = {
    "text_output": "BYTES",
    "finish_reason": "BYTES",
    "num_input_tokens": "UINT32",
    "num_output_tokens": "UINT32",
}


@dataclass(frozen=True, slots=True)
class InferCall:
    """A parsed ModelInferRequest."""

    message: pb.GenerateRequest
    stream: bool
    prefix: str  # of an answer that is not streamed: the prompt, unless excluded
    outputs: frozenset[str]
    raw: bool  # inputs and outputs are raw bytes

    @classmethod
    def parse(cls, request: oip.ModelInferRequest) -> InferCall:
        inputs = _inputs(request)
        text = inputs.pop("text_input", None)
        if not isinstance(text, str):
            raise InvalidRequest("the input text_input is missing", field="text_input")
        stream = bool(inputs.pop("stream", False))
        exclude = bool(inputs.pop("exclude_input_in_output", stream))
        if stream and not exclude:
            raise InvalidRequest(
                "exclude_input_in_output must not be false in a stream",
                field="exclude_input_in_output",
            )
        outputs = {name for flag, name in _WANTED.items() if inputs.pop(flag, False)}
        message = pb.GenerateRequest(model=request.model_name, text=text, request_id=request.id)
        for name, value in _sampling(request, inputs).items():
            _set(message, _RENAMED.get(name, name), value)
        if stream and message.n > 1:
            raise NotServed("a stream has one answer", field="n")
        wanted = frozenset({"text_output", *outputs, *(each.name for each in request.outputs)})
        if unknown := sorted(wanted - OUTPUTS.keys()):
            raise NotServed(f"there is no output {unknown[0]}", field="outputs")
        raw = bool(request.raw_input_contents)
        return cls(message, stream, "" if exclude else text, wanted, raw)


def _inputs(request: oip.ModelInferRequest) -> dict[str, Scalar]:
    raw: Sequence[bytes | None] = request.raw_input_contents or [None] * len(request.inputs)
    if len(raw) != len(request.inputs):
        raise InvalidRequest(
            f"raw_input_contents has {len(raw)} entries for {len(request.inputs)} inputs",
            field="raw_input_contents",
        )
    found = {}
    for tensor, content in zip(request.inputs, raw, strict=True):
        if tensor.name in _UNSERVED:
            raise NotServed(f"{tensor.name} is not served", field=tensor.name)
        try:
            found[tensor.name] = _element(tensor, content)
        except (ValueError, struct.error):
            raise InvalidRequest(
                f"{tensor.name} must have one element of its datatype,"
                f" {', '.join(_NUMBERS)} or BYTES in UTF-8",
                field=tensor.name,
            ) from None
    return found


def _element(tensor: oip.ModelInferRequest.InferInputTensor, raw: bytes | None) -> Scalar:
    """Returns the tensor's single element. Raises ValueError or struct.error."""
    if tensor.datatype == "BYTES":
        if raw is None:
            (content,) = tensor.contents.bytes_contents
        else:
            (length,), content = struct.unpack("<I", raw[:4]), raw[4:]
            if length != len(content):
                raise ValueError(length)
        return content.decode()
    if tensor.datatype not in _NUMBERS:
        raise ValueError(tensor.datatype)
    field, form = _NUMBERS[tensor.datatype]
    value: Scalar
    (value,) = getattr(tensor.contents, field) if raw is None else struct.unpack(form, raw)
    return value


def _sampling(request: oip.ModelInferRequest, inputs: dict[str, Scalar]) -> dict[str, object]:
    given: dict[str, object] = {
        name: getattr(value, value.WhichOneof("parameter_choice") or "string_param")
        for name, value in request.parameters.items()
        if not name.startswith(_PROTOCOL)
    }
    text = inputs.pop("sampling_parameters", "{}")
    try:
        fields = json.loads(text) if isinstance(text, str) else None
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        raise InvalidRequest(
            "sampling_parameters must be a JSON object", field="sampling_parameters"
        )
    return {**given, **fields, **inputs}


def _set(message: pb.GenerateRequest, name: str, value: object) -> None:
    """Accepts numbers as strings, which Triton's own clients send."""
    if name not in _SAMPLING and name not in _OTHERS:
        raise NotServed(f"{name} is not served", field=name)
    if name == "stop" and isinstance(value, str):
        value = [value]
    if name == "top_k" and value in (-1, "-1"):  # all, as for vLLM
        value = 0
    try:
        ParseDict({name: value}, message.sampling if name in _SAMPLING else message)
    except ParseError:
        shown = json.dumps(value)[:40]
        raise InvalidRequest(f"{name} has a wrong value: {shown}", field=name) from None


def add_output(
    response: oip.ModelInferResponse,
    name: str,
    elements: Sequence[Any],
    raw: bool,
) -> None:
    output = response.outputs.add(name=name, datatype=OUTPUTS[name], shape=[len(elements)])
    if raw:
        response.raw_output_contents.append(b"".join(map(_raw, elements)))
    elif output.datatype == "BYTES":
        output.contents.bytes_contents.extend(elements)
    else:
        output.contents.uint_contents.extend(elements)


def _raw(element: bytes | int) -> bytes:
    if isinstance(element, int):
        return struct.pack("<I", element)
    return struct.pack("<I", len(element)) + element
