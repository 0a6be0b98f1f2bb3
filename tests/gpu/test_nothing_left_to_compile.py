"""Once a GPU is ready, no request waits for a kernel to be compiled."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator

import pytest
import torch
from pools import CUDA
from small_shapes import CONTEXT, EXPERTS, LATENTS, SHAPE, SINKS

from baton.core.types import AttemptKey, Sampling, Work
from baton.engine.architecture import Architecture, parse_architecture
from baton.engine.gpu.device import GpuSettings
from baton.engine.gpu.start import start_runner
from baton.engine.model_choice import WeightQuantization
from baton.engine.page_groups import make_pool
from baton.engine.random_tensors import RandomTensors
from baton.engine.sequence import Sequence
from baton.engine.step import Plan
from baton.engine.weights import load_model

pytestmark = pytest.mark.skipif(not CUDA, reason="needs a CUDA GPU")

PAGE_SIZE, PAGES = 16, 4096
SAMPLINGS = [
    Sampling(),
    Sampling(temperature=0.7, top_p=0.9),
    Sampling(temperature=1.0, top_k=20, min_p=0.1),
    Sampling(presence_penalty=0.5, frequency_penalty=0.5),
    Sampling(repetition_penalty=1.2, temperature=0.7),
    Sampling(logit_bias=((7, 3.0),)),
]


class Server:
    """A runner that is ready, and what it has compiled since."""

    def __init__(
        self, shape: Architecture, quantization: WeightQuantization, compiled: list[str]
    ) -> None:
        model = load_model(
            RandomTensors("cuda"), shape, torch.bfloat16, "cuda", quantization=quantization
        )
        size = shape.pages_shape(PAGES, PAGE_SIZE)
        kv = torch.zeros(size, dtype=torch.bfloat16, device="cuda")
        self.pool = make_pool(PAGES, PAGE_SIZE, shape.slices.windows)
        settings = GpuSettings(chunk_tokens=2048, max_batch=64)
        self.runner = start_runner(model, kv, self.pool, CONTEXT, settings, lambda what, done: None)
        self.compiled = compiled
        compiled.clear()

    def submit(self, length: int, sampling: Sampling) -> Sequence:
        prompt = [each % 6000 for each in range(length)]
        work = Work(AttemptKey("asked", 0), prompt, sampling, 64, frozenset())
        pages = self.pool.pages_for(length + 64)
        lease = self.pool.acquire(pages)
        lease.cover(pages)
        return Sequence(work, lease)

    def step(self, plan: Plan) -> None:
        tokens = self.runner.launch(plan).wait()
        for sequence, token in zip(plan, tokens, strict=True):
            if isinstance(token, int):
                sequence.append(token)

    def read(self, sequence: Sequence, chunk: int, beside: list[Sequence]) -> None:
        while sequence.computed < sequence.prompt_length:
            count = min(chunk, sequence.prompt_length - sequence.computed)
            self.step({**dict.fromkeys(beside, 1), sequence: count})


@pytest.fixture(
    scope="module",
    params=[
        *((shape, "none") for shape in (SHAPE, EXPERTS, SINKS, LATENTS)),
        *((SHAPE, quantization) for quantization in ("fp8", "int4")),
    ],
    ids=["dense", "experts", "sinks", "latents", "fp8", "int4"],
)
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    from triton import knobs

    config = tmp_path_factory.mktemp("model") / "config.json"
    shape, quantization = request.param
    config.write_text(json.dumps(shape))
    compiled: list[str] = []

    def note(*, repr: str, **_: object) -> None:
        compiled.append(repr)

    knobs.runtime.jit_post_compile_hook = note
    yield Server(parse_architecture(config), quantization, compiled)
    knobs.runtime.jit_post_compile_hook = None


def test_prompts_of_any_length_in_any_chunks_alone_and_beside_answers(server: Server) -> None:
    running = [server.submit(20, Sampling()) for _ in range(3)]
    server.step(dict.fromkeys(running, 20))
    lengths, chunks = (17, 64, 513, 1000, 2078, 5000), (2048, 700, 528)
    for length, chunk, beside in itertools.product(lengths, chunks, (0, 3)):
        sequence = server.submit(length, Sampling())
        server.read(sequence, chunk, running[:beside])
        server.step({sequence: 1})
        sequence.lease.release()
    for each in running:
        each.lease.release()
    assert server.compiled == []


@pytest.mark.parametrize("rows", [1, 5, 40])
def test_tokens_chosen_in_any_way(server: Server, rows: int) -> None:
    for sampling in SAMPLINGS:
        batch = [server.submit(10, sampling) for _ in range(rows)]
        server.step(dict.fromkeys(batch, 10))
        server.step(dict.fromkeys(batch, 1))
        for each in batch:
            each.lease.release()
    assert server.compiled == []
