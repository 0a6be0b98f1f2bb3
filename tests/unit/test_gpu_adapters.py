"""LoRA adapters in the GPU's runner, interpreted here; PEFT is the oracle."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from adapters import ALL, ATTENTION, LATENT, save_adapter
from engine_loop import serve
from gpu_ranks import engine_of, gpu_runner, two_ranks
from tiny_models import TINY_MODELS, choices_of_transformers, save

from baton.core.adapter_store import find_adapter
from baton.core.errors import InvalidAdapter
from baton.engine.gpu.device import AdapterRoom

pytestmark = pytest.mark.usefixtures("few_programs")

PAGES, PAGE_SIZE, COUNT = 64, 4, 2
PROMPTS = [[7, 3, 90, 41, 8], [5, 100, 61], [9, 12, 4, 4, 77, 30], [44]]
FUSED = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]
SETTINGS: list[dict[str, object]] = [
    {"r": 6, "target_modules": ATTENTION, "use_rslora": True},
    {"r": 20, "lora_alpha": 3, "target_modules": ALL},
    {"r": 5, "target_modules": ["k_proj", "gate_proj", "down_proj"], "layers_to_transform": [1]},
]


def settings_of(name: str) -> list[dict[str, object]]:
    """Of three adapters of a model."""
    if "phi3" in name:
        return [{"r": rank, "target_modules": FUSED} for rank in (1, 16, 32)]
    if name == "mixtral":
        return SETTINGS[:1] * 3
    if "deepseek" in name:
        queries = ["q_proj"] if "lite" in name else ["q_a_proj", "q_b_proj"]
        return [
            {"r": 6, "target_modules": [*queries, *LATENT], "use_rslora": True},
            {"r": 20, "target_modules": ["kv_b_proj"]},
            {"r": 5, "target_modules": [*queries, *LATENT], "layers_to_transform": [1]},
        ]
    return SETTINGS


@pytest.mark.parametrize(
    "name", ["llama-biases", "phi3-partial", "mixtral", "deepseek-v2-lite", "deepseek-v3"]
)
def test_one_batch_of_a_gpu_mixes_adapters_and_the_base(
    name: str, device: torch.device, tmp_path: Path
) -> None:
    """Two of three fit; the third takes the place of the one that is not needed any more."""
    base = save(TINY_MODELS[name].changed(num_hidden_layers=2), tmp_path / "base")
    models = [
        save_adapter(base, tmp_path / str(seed), seed=seed, **each)
        for seed, each in enumerate(settings_of(name))
    ]
    found = [find_adapter(str(tmp_path / str(seed))) for seed in range(3)]
    runner = gpu_runner(
        tmp_path / "base", str(device), PAGES, PAGE_SIZE, room=AdapterRoom(2, 32, 0)
    )
    engine = engine_of(runner, tmp_path / "base", PAGES, PAGE_SIZE)
    pool = engine.open_adapters(2, [str(tmp_path)], lambda: None)
    for pair in ((0, 1), (1, 2)):
        for each in pair:
            if found[each].digest not in pool.loaded:
                pool._make_room({found[pair[0]].digest})
                pool.load_now(found[each])
        adapters = [found[pair[0]], None, found[pair[1]], found[pair[0]]]
        answers = serve(engine, PROMPTS, COUNT, chunk=4, join_every=1, adapters=adapters)
        of = [models[pair[0]], base, models[pair[1]], models[pair[0]]]
        for model, prompt, answer in zip(of, PROMPTS, answers, strict=True):
            assert [answer] == choices_of_transformers(model, [prompt], [answer])


@pytest.mark.parametrize("name", ["llama-biases", "phi3-partial", "deepseek-v2"])
def test_two_ranks_of_a_gpu_share_adapters_too(
    name: str, device: torch.device, tmp_path: Path
) -> None:
    base = save(TINY_MODELS[name].changed(num_hidden_layers=2), tmp_path / "base")
    special = {"phi3-partial": FUSED, "deepseek-v2": ["q_a_proj", "q_b_proj", *LATENT]}
    targets = special.get(name, ALL)
    model = save_adapter(base, tmp_path / "adapter", target_modules=targets)
    found = find_adapter(str(tmp_path / "adapter"))
    arguments = tmp_path / "base", str(device), PAGES, PAGE_SIZE, tmp_path, AdapterRoom(1, 4, 0)
    with two_ranks(*arguments) as runner:
        engine = engine_of(runner, tmp_path / "base", PAGES, PAGE_SIZE)
        pool = engine.open_adapters(1, [str(tmp_path)], lambda: None)
        pool.load_now(found)
        pool._make_room(())
        pool.load_now(found)
        answers = serve(engine, PROMPTS[:2], COUNT, chunk=4, adapters=[found, None])
    for each, prompt, answer in zip((model, base), PROMPTS, answers, strict=False):
        assert [answer] == choices_of_transformers(each, [prompt], [answer])


def test_a_rank_beyond_the_room_of_a_slot_is_refused(device: torch.device, tmp_path: Path) -> None:
    base = save(TINY_MODELS["llama"].changed(num_hidden_layers=2), tmp_path / "base")
    save_adapter(base, tmp_path / "adapter", r=9)
    runner = gpu_runner(tmp_path / "base", str(device), PAGES, PAGE_SIZE, room=AdapterRoom(1, 8, 0))
    assert runner._adapters
    with pytest.raises(InvalidAdapter, match=r"has rank 9; the configuration allows 8"):
        runner._adapters.load_adapter(find_adapter(str(tmp_path / "adapter")))
