"""Checks that need several GPUs or hosts, one per call; deploy/smoke/multi_gpu.sh runs them all.

    python -m bench.multi_gpu tensor-parallel --ranks 2
    python -m bench.multi_gpu rank-killed --ranks 2
    python -m bench.multi_gpu between-gpus --transport cuda_ipc
    python -m bench.multi_gpu peer-worker --host 10.0.0.2         # on the second host
    python -m bench.multi_gpu between-hosts --host 10.0.0.1 --peer 10.0.0.2:51002

Greedy answers must equal those of workers with one process each on this host. A check prints one
line with its result and exits with 0, or with 1 and the reason. The model is a small Llama shape
with random weights in float32, unless --model names a folder.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from baton import Client
from baton.core.errors import BatonError
from baton.core.metrics import TRANSFER_BYTES, TRANSFER_SECONDS
from baton.core.model_store import EMBEDDED, locate
from bench.counters import total
from bench.processes import FREE_ROUTER, Process, router, workers

Tree = dict[str, object]
Answers = list[list[int]]

SHAPE = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
}
PROMPTS, PROMPT, ANSWER = 4, 600, 48
PEER_PORT = 51002
# After this many tokens of an answer its decode worker loses a rank.
KILL_AFTER = 6


def small_model(folder: Path) -> Path:
    """Writes a shape that splits over 2, 4 and 8 ranks, and a tokenizer."""
    embedded = locate(EMBEDDED)
    for file in embedded.glob("*token*.json"):
        (folder / file.name).symlink_to(file)
    config = json.loads((embedded / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **SHAPE}))
    return folder


def tree_of(options: argparse.Namespace, ranks: int, host: str = "127.0.0.1") -> Tree:
    pool = {"tensor_parallel": ranks, "host": host, "kv_memory": options.kv_memory}
    decode: Tree = {**pool, "max_batch": 8, **({"port": PEER_PORT} if options.serves else {})}
    return {
        "model": str(options.model),
        "weights": "random" if options.random_weights else "files",
        "dtype": "float32",
        "device": options.device,
        "transport": options.transport,
        "insecure": host != "127.0.0.1",
        "max_context": 4096,
        "prefill": pool,
        "decode": decode,
        "router": {**FREE_ROUTER, "local_prefill": "never"},
    }


def prompts() -> Answers:
    draw = random.Random(24)
    return [[draw.randrange(5, 30_000) for _ in range(PROMPT)] for _ in range(PROMPTS)]


def ask(client: Client) -> Answers:
    return [
        list(client.generate(prompt, max_tokens=ANSWER, ignore_eos=True, timeout=300).token_ids)
        for prompt in prompts()
    ]


@contextlib.contextmanager
def cluster(folder: Path, tree: Tree, members: Sequence[Process]) -> Iterator[Client]:
    with router(folder, tree, members) as running, Client(running.address) as client:
        yield client


def reference(folder: Path, options: argparse.Namespace) -> Answers:
    """The answers of a pair of one process each, on the first GPU."""
    tree = tree_of(options, 1) | {"transport": "auto"}
    names = ("prefill-0", "decode-0")
    with (
        workers(folder, tree, names, gpus(options, "0")) as started,
        cluster(folder, tree, list(started.values())) as client,
    ):
        return ask(client)


def gpus(options: argparse.Namespace, visible: str) -> dict[str, str]:
    return {"CUDA_VISIBLE_DEVICES": visible} if options.device == "cuda" else {}


def compare(found: Answers, wanted: Answers) -> None:
    for number, (ours, theirs) in enumerate(zip(found, wanted, strict=True)):
        if ours != theirs:
            same = next(
                i for i, pair in enumerate(zip(ours, theirs, strict=False)) if len({*pair}) > 1
            )
            raise SystemExit(f"answer {number} differs from one process's at token {same}")


def tensor_parallel(folder: Path, options: argparse.Namespace, wanted: Answers) -> str:
    tree = tree_of(options, options.ranks)
    with (
        workers(folder, tree, ("prefill-0", "decode-0")) as started,
        cluster(folder, tree, list(started.values())) as client,
    ):
        began = time.perf_counter()
        compare(ask(client), wanted)
        seconds = time.perf_counter() - began
    return f"{PROMPTS} answers equal; {PROMPTS * ANSWER / seconds:.0f} tokens a second, one stream"


def rank_killed(folder: Path, options: argparse.Namespace, wanted: Answers) -> str:
    tree = tree_of(options, options.ranks)
    names = ("prefill-0", "decode-0", "decode-1")
    with (
        workers(folder, tree, names) as started,
        cluster(folder, tree, list(started.values())) as client,
    ):
        found, lost = stream_over_a_loss(client, started)
        compare([found], wanted[:1])
        ask(client)
    return f"{lost} lost rank 1 after {KILL_AFTER} tokens; the answer is equal, others follow"


def stream_over_a_loss(client: Client, started: Mapping[str, Process]) -> tuple[list[int], str]:
    """Kills a rank of a stream's decode worker. Returns the stream's tokens and the worker."""
    found: list[int] = []
    lost = ""
    with client.stream(prompts()[0], max_tokens=ANSWER, ignore_eos=True, timeout=300) as stream:
        for delta in stream:
            found += delta.token_ids
            if len(found) >= KILL_AFTER and not lost:
                lost = busy_decoder(client)
                os.kill(children(started[lost].pid)[0], signal.SIGKILL)
    return found, lost


def busy_decoder(client: Client) -> str:
    (name,) = [
        worker.member.worker_id
        for worker in client.status().workers
        if worker.active_requests and worker.member.worker_id.startswith("decode")
    ]
    return name


def children(pid: int) -> list[int]:
    """Child processes of any thread of the process."""
    files = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(one) for file in files for one in file.read_text().split()]


def between_gpus(folder: Path, options: argparse.Namespace, wanted: Answers) -> str:
    tree = tree_of(options, 1)
    here, there = folder / "first", folder / "second"
    here.mkdir()
    there.mkdir()
    with (
        workers(here, tree, ["prefill-0"], gpus(options, "0")) as first,
        workers(there, tree, ["decode-0"], gpus(options, "1")) as second,
    ):
        return moved(folder, tree, [*first.values(), *second.values()], wanted)


def between_hosts(folder: Path, options: argparse.Namespace, wanted: Answers) -> str:
    tree = tree_of(options, 1, options.host)
    with workers(folder, tree, ["prefill-0"], gpus(options, "0")) as started:
        return moved(folder, tree, [*started.values(), Process(0, options.peer)], wanted)


def moved(folder: Path, tree: Tree, members: Sequence[Process], wanted: Answers) -> str:
    with (
        router(folder, tree, members) as running,
        Client(running.address) as client,
    ):
        compare(ask(client), wanted)
        return f"{PROMPTS} answers equal; {transferred(running.metrics)}"


def transferred(metrics: str) -> str:
    size, seconds = total(metrics, TRANSFER_BYTES), total(metrics, TRANSFER_SECONDS)
    return f"{size / 1e6:.1f} MB moved in {seconds * 1e3:.1f} ms, {size / seconds / 1e9:.2f} GB/s"


def peer_worker(folder: Path, options: argparse.Namespace) -> None:
    tree = tree_of(options, 1, options.host)
    with workers(folder, tree, ["decode-0"], gpus(options, "0")) as started:
        print(f"decode-0 listens on {started['decode-0'].address}; Ctrl-C ends it", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            signal.pause()


CHECKS = {
    "tensor-parallel": tensor_parallel,
    "rank-killed": rank_killed,
    "between-gpus": between_gpus,
    "between-hosts": between_hosts,
}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("check", choices=[*CHECKS, "peer-worker"])
    parser.add_argument("--model", type=Path, help="a Hugging Face folder with weights")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--transport", default="auto")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--host", default="127.0.0.1", help="this host's address for the other")
    parser.add_argument("--peer", default="", help="the other host's worker")
    parser.add_argument("--kv-memory", default="256MiB")
    options = parser.parse_args()
    options.random_weights = options.model is None
    options.serves = options.check == "peer-worker"
    return options


def main() -> None:
    options = parse()
    # SIGTERM stops the started processes, as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if options.random_weights:
            (folder / "model").mkdir()
            options.model = small_model(folder / "model")
        if options.serves:
            peer_worker(folder, options)
            return
        try:
            wanted = reference(folder, options)
            print(CHECKS[options.check](folder, options, wanted))
        except BatonError as error:
            sys.exit(str(error))


if __name__ == "__main__":
    main()
