"""Many LoRA adapters in few slots: which requests find theirs loaded, by placement policy.

    python -m bench.adapters --zipf

Four prefill and four decode workers, processes on CPUs, have room for 16 adapters each. Requests
draw one of 200 adapters, the k-th with a weight of 1/k (Zipf); their prompts share nothing, so
cached pages have no effect. Each policy gets fresh workers without adapters. A request asks a
worker of each pool for its adapter: a hit if it is loaded, else a load, which all requests that
wait for the same adapter share.

For comparison a simulation gives a pool's hit rates with workers chosen at random, with one worker
that has all slots and so keeps no copies, and with the most requested adapters always loaded.
"""

from __future__ import annotations

import json
import random
import tempfile
import time
from collections import Counter, OrderedDict
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors.torch import save_file

from baton import Client
from baton.core.adapter_config import CONFIG_FILE, WEIGHTS_FILE
from baton.core.metrics import ADAPTER_EVENTS
from baton.engine.adapter_weights import places_of
from baton.engine.architecture import parse_architecture
from baton.engine.model import Model
from baton.engine.random_tensors import RandomTensors
from baton.engine.weights import load_model
from bench.counters import samples
from bench.processes import FREE_ROUTER, Process, router, workers

ADAPTERS, SLOTS, POOL, RANK = 200, 16, 4, 4
PARTS, REQUESTS, CLIENTS = 4, 300, 8
"""Parts of a run, requests per part, and concurrent requests."""
PROMPT, ANSWER = 24, 4
POLICIES = ("kv_aware", "least_loaded", "round_robin")
POOLS = ("prefill", "decode")

SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}


def write_adapter(model: Model, folder: Path, rank: int) -> None:
    """Writes an adapter of all linear layers, with random weights."""
    tensors = {}
    for place in places_of(model):
        name = f"base_model.model.{place.module}.lora_"
        tensors[f"{name}A.weight"] = torch.randn(rank, place.layer.weight.shape[1])
        tensors[f"{name}B.weight"] = torch.randn(place.outputs, rank) / 100
    save_file({name: each.bfloat16() for name, each in tensors.items()}, folder / WEIGHTS_FILE)
    modules = sorted({place.module.rsplit(".", 1)[1] for place in places_of(model)})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": modules}
    (folder / CONFIG_FILE).write_text(json.dumps(config))


def write_all(folder: Path) -> dict[str, str]:
    """Writes a model and its adapters. Returns the adapters' folders by name."""
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(SHAPE))
    shape = parse_architecture(folder / "model" / "config.json")
    model = load_model(RandomTensors("cpu"), shape, torch.float32, "cpu")
    adapters = {f"a{number}": folder / "adapters" / str(number) for number in range(ADAPTERS)}
    for place in adapters.values():
        place.mkdir(parents=True)
        write_adapter(model, place, RANK)
    return {name: str(place) for name, place in adapters.items()}


def draw(names: Sequence[str]) -> list[str]:
    """Draws the adapter of each request."""
    weights = [1 / (rank + 1) for rank in range(len(names))]
    return random.Random(0).choices(names, weights, k=PARTS * REQUESTS)


def ask(client: Client, names: Sequence[str], seed: int) -> None:
    prompts = random.Random(seed)

    def one(model: str, prompt: list[int]) -> None:
        client.generate(prompt, model=model, max_tokens=ANSWER, ignore_eos=True, timeout=300)

    drawn = [prompts.choices(range(256), k=PROMPT) for _ in names]
    with ThreadPoolExecutor(CLIENTS) as threads:
        list(threads.map(one, names, drawn))


def events(members: Collection[Process], requests: int) -> Counter[str]:
    """Counts of adapter events in these workers, once they have reported `requests` requests."""
    while (found := reported(members))["requested"] < requests:
        time.sleep(0.1)
    return found


def reported(members: Collection[Process]) -> Counter[str]:
    found: Counter[str] = Counter()
    for member in members:
        for sample in samples(member.metrics, ADAPTER_EVENTS):
            found[sample.labels["event"]] += int(sample.value)
    return found


def run(policy: str, folder: Path, adapters: dict[str, str], asked: Sequence[str]) -> None:
    pool = {"kv_memory": "4MiB", "threads": 1}
    tree: dict[str, object] = {
        "model": str(folder / "model"),
        "weights": "random",
        "dtype": "float32",
        "adapter_folders": [str(folder / "adapters")],
        "adapter_slots": SLOTS,
        "prefill": pool,
        "decode": {**pool, "nice": 0},
    }
    settings = {**FREE_ROUTER, "policy": policy, "local_prefill": "never"}
    names = [f"{role}-{index}" for role in POOLS for index in range(POOL)]
    with workers(folder, tree, names, metrics=True) as started:
        pools = [[started[name] for name in names if name.startswith(role)] for role in POOLS]
        routed = {**tree, "router": settings, "adapters": adapters}
        with router(folder, routed, started.values()) as door, Client(door.address) as client:
            before = [Counter[str]() for _ in pools]
            for part in range(PARTS):
                end = (part + 1) * REQUESTS
                ask(client, asked[end - REQUESTS : end], part)
                after = [events(pool, end) for pool in pools]
                changes = [now - then for now, then in zip(after, before, strict=True)]
                print_part(policy, part, changes)
                before = after


def print_part(policy: str, part: int, changes: Sequence[Counter[str]]) -> None:
    first = part * REQUESTS
    cells = "".join(
        f"{change['hit'] / change['requested']:>14.1%}{change['loaded'] / REQUESTS:>8.2f}"
        for change in changes
    )
    print(f"{policy:<14}{f'{first + 1:,} to {first + REQUESTS:,}':<18}{cells}", flush=True)


def hit_rate(asked: Sequence[str], workers: int, slots: int) -> float:
    """The hit rate of workers that are chosen at random and evict the least recently used
    adapter."""
    chance, places = random.Random(0), [OrderedDict[str, None]() for _ in range(workers)]
    hits = 0
    for name in asked:
        place = chance.choice(places)
        hits += name in place
        place[name] = None
        place.move_to_end(name)
        if len(place) > slots:
            place.popitem(last=False)
    return hits / len(asked)


def print_bounds(asked: Sequence[str]) -> None:
    best = sum(count for _, count in Counter(asked).most_common(POOL * SLOTS)) / len(asked)
    rates = {
        "hits by chance": hit_rate(asked, POOL, SLOTS),
        "hits of one worker with all places": hit_rate(asked, 1, POOL * SLOTS),
        "hits of the most wanted adapters, always loaded": best,
    }
    for title, rate in rates.items():
        print(f"{title:<50}{rate:>8.1%}")


def main() -> None:
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        adapters = write_all(folder)
        asked = draw(list(adapters))
        print_bounds(asked)
        heads = "".join(f"{role + ' hits':>14}{'loads':>8}" for role in POOLS)
        print(f"{'policy':<14}{'requests':<18}{heads}  (loads a request)")
        for policy in POLICIES:
            run(policy, folder, adapters, asked)


if __name__ == "__main__":
    main()
