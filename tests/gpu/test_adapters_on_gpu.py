"""LoRA adapters on a GPU: answers as of merged weights, and a row's bits in any company."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from pools import CUDA
from random_shapes import SHAPES, SMALL, VOCABULARY
from safetensors.torch import load_file, save_file
from torch import Tensor

from baton.core.adapter_config import CONFIG_FILE, WEIGHTS_FILE
from baton.core.adapter_store import find_adapter
from baton.core.types import Adapter, AttemptKey, Sampling, Work
from baton.engine.architecture import parse_architecture
from baton.engine.checkpoint import Arrange, Cut
from baton.engine.gpu.adapter_slots import AdapterSlots
from baton.engine.gpu.device import AdapterRoom
from baton.engine.gpu.runner import GpuRunner
from baton.engine.model import Model
from baton.engine.page_groups import make_pool
from baton.engine.random_tensors import RandomTensors
from baton.engine.sequence import Sequence
from baton.engine.step import Plan
from baton.engine.weights import load_model

pytestmark = pytest.mark.skipif(not CUDA, reason="needs a CUDA GPU")

Shape = dict[str, Any]

PAGES, PAGE_SIZE, ANSWER = 2048, 16, 6
LATENTS = SHAPES["deepseek-v3"]
SHORT_LATENTS = LATENTS | {"kv_lora_rank": 128, "first_k_dense_replace": 3}
"""Which fit on the chip in float32, and without experts: a rounded score can change the choice."""

HEADS, PLAIN, ROTATED, VALUE = 32, 128, 64, 128
RANKS = (4, 16, 9)
LENGTHS = (1, 40, 300, 7, 33, 700, 5, 64)


def attention_of(shape: Shape) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of the linear layers of attention."""
    hidden = shape["hidden_size"]
    if shape is SMALL:
        outputs = {"q_proj": 576, "k_proj": 192, "v_proj": 192, "o_proj": 576}
        return {name: (size, 576) for name, size in outputs.items()}
    latent = shape.get("kv_lora_rank", 512)
    return {
        "q_a_proj": (384, hidden),
        "q_b_proj": (HEADS * (PLAIN + ROTATED), 384),
        "kv_a_proj_with_mqa": (latent + ROTATED, hidden),
        "kv_b_proj": (HEADS * (PLAIN + VALUE), latent),
        "o_proj": (hidden, HEADS * VALUE),
    }


def modules(shape: Shape) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of all linear layers that adapters may add to."""
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    mlp = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    found = {}
    for layer in range(3):
        prefix = f"model.layers.{layer}."
        found |= {f"{prefix}self_attn.{name}": size for name, size in attention_of(shape).items()}
        if layer < shape.get("first_k_dense_replace", 3):
            found |= {f"{prefix}mlp.{name}": size for name, size in mlp.items()}
    return found


def write_adapter(folder: Path, rank: int, shape: Shape) -> Adapter:
    folder.mkdir(parents=True)
    torch.manual_seed(rank)
    tensors, targets = {}, set()
    for module, (outputs, inputs) in modules(shape).items():
        targets.add(module.rpartition(".")[2])
        tensors[f"base_model.model.{module}.lora_A.weight"] = torch.randn(rank, inputs) / 20
        tensors[f"base_model.model.{module}.lora_B.weight"] = torch.randn(outputs, rank) / 20
    save_file(tensors, folder / WEIGHTS_FILE)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank}
    config["target_modules"] = sorted(targets)
    (folder / CONFIG_FILE).write_text(json.dumps(config))
    return find_adapter(str(folder))


class Merged(RandomTensors):
    """Random weights with an adapter merged into them."""

    def __init__(self, adapter: Adapter) -> None:
        super().__init__("cuda")
        self._tensors = load_file(Path(adapter.folder) / WEIGHTS_FILE)

    def copy(
        self, name: str, target: Tensor, arrange: Arrange | None = None, cut: Cut | None = None
    ) -> None:
        prefix = f"base_model.model.{name.removesuffix('.weight')}.lora_"
        if f"{prefix}A.weight" not in self._tensors:
            super().copy(name, target, arrange, cut)
            return
        super().copy(name, target)
        a, b = (self._tensors[f"{prefix}{side}.weight"].cuda().double() for side in "AB")
        whole = (target.double() + 2 * (b @ a)).to(target.dtype)
        target.copy_(arrange(whole) if arrange else whole)


def model_of(
    folder: Path, shape: Shape, dtype: torch.dtype, source: RandomTensors | None = None
) -> Model:
    (folder / "config.json").write_text(json.dumps(shape))
    parsed = parse_architecture(folder / "config.json")
    return load_model(source or RandomTensors("cuda"), parsed, dtype, "cuda")


class Server:
    """A runner whose logits are kept by prompt and position."""

    def __init__(self, model: Model, adapters: list[Adapter]) -> None:
        shape = model.architecture
        kv = torch.zeros(
            shape.pages_shape(PAGES, PAGE_SIZE), dtype=model.embedding.dtype, device="cuda"
        )
        self.pool = make_pool(PAGES, PAGE_SIZE, shape.slices.windows)
        slots = AdapterSlots(model, AdapterRoom(4, 16, 0)) if adapters else None
        self.runner = GpuRunner(model, kv, 4096, 16, chunk_tokens=1024, adapters=slots)
        for adapter in adapters if slots else []:
            slots.add_adapter(adapter, slots.load_adapter(adapter))
        with self.runner.compiling():  # on all cores; in float32 it takes minutes on one
            pass
        self.runner.record()
        self.logits: dict[tuple[str, int], Tensor] = {}
        sampler = self.runner._sampler
        sample = sampler.sample

        def keep(logits: Tensor, sequences: list[Sequence]) -> Tensor:
            for row, each in zip(logits.clone(), sequences, strict=True):
                self.logits[each.work.key.request_id, len(each.tokens)] = row
            return sample(logits, sequences)

        sampler.sample = keep  # type: ignore[method-assign]

    def answers(
        self, which: list[int], adapters: list[Adapter | None], chunk: int = 4096
    ) -> list[list[int]]:
        """All prompts at once, in chunks."""
        sequences = [self._submit(prompt, adapters[prompt]) for prompt in which]
        while left := [each for each in sequences if each.generated < ANSWER]:
            plan: Plan = {each: min(chunk, each.uncomputed) for each in left}
            for each, token in zip(plan, self.runner.launch(plan).wait(), strict=True):
                if isinstance(token, int):
                    each.append(token)
        for each in sequences:
            each.lease.release()
        return [each.tokens[each.prompt_length :] for each in sequences]

    def _submit(self, prompt: int, adapter: Adapter | None) -> Sequence:
        tokens = random.Random(prompt).choices(range(VOCABULARY), k=LENGTHS[prompt])
        key = AttemptKey(str(prompt), 0)
        work = Work(key, tokens, Sampling(), ANSWER, frozenset(), adapter=adapter)
        lease = self.pool.acquire(self.pool.pages_for(len(tokens) + ANSWER))
        lease.cover(self.pool.pages_for(len(tokens) + ANSWER))
        return Sequence(work, lease)


def write_adapters(folder: Path, shape: Shape) -> list[Adapter]:
    return [write_adapter(folder / str(rank), rank, shape) for rank in RANKS]


def of_prompts(adapters: list[Adapter]) -> list[Adapter | None]:
    """Each prompt's: several prompts of each adapter, and of the base."""
    choices = [*adapters, None]
    return [choices[prompt % len(choices)] for prompt in range(len(LENGTHS))]


@pytest.mark.parametrize("shape", [SMALL, SHORT_LATENTS], ids=["small", "latents"])
def test_a_mixed_batch_answers_as_merged_weights_do(shape: Shape, tmp_path: Path) -> None:
    adapters = write_adapters(tmp_path, shape)
    every, chosen = list(range(len(LENGTHS))), of_prompts(adapters)
    model = model_of(tmp_path, shape, torch.float32)
    found = Server(model, adapters).answers(every, chosen, chunk=256)
    plain: list[Adapter | None] = [None] * len(LENGTHS)
    of_base = Server(model, []).answers(every, plain)
    for adapter in (*adapters, None):
        source = Merged(adapter) if adapter else None
        prompts = [prompt for prompt in every if chosen[prompt] == adapter]
        merged_model = model_of(tmp_path, shape, torch.float32, source)
        merged = Server(merged_model, []).answers(prompts, plain)
        assert [found[prompt] for prompt in prompts] == merged
        assert (adapter is None) == (merged == [of_base[prompt] for prompt in prompts])


@pytest.mark.parametrize("shape", [SMALL, LATENTS], ids=["small", "latents"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_row_has_the_same_bits_alone_and_in_any_company(
    dtype: torch.dtype, shape: Shape, tmp_path: Path
) -> None:
    adapters = write_adapters(tmp_path, shape)
    every, chosen = list(range(len(LENGTHS))), of_prompts(adapters)
    model = model_of(tmp_path, shape, dtype)
    server = Server(model, adapters)
    for prompt in every:
        server.answers([prompt], chosen)
    alone = dict(server.logits)
    for chunk in (4096, 48, 8):
        server.answers(every, chosen, chunk)
        assert server.logits.keys() == alone.keys()
        for place, row in server.logits.items():
            assert torch.equal(row, alone[place]), (place, chunk)
    plain = Server(model, [])
    base = [prompt for prompt in every if chosen[prompt] is None]
    plain.answers(base, chosen)
    for place, row in plain.logits.items():
        assert torch.equal(row, alone[place]), place
