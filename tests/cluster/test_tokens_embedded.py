"""The embedded model through the whole path: transformers' tokens, whatever else runs. What
compares clusters with one another runs its first layers."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from processes import ProcessCluster
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from baton import Answer
from baton.core.model_store import embedded_folder

ANSWER = 12
ROOT = Path(__file__).parents[2]

QUESTIONS = [
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "List three uses of a paper clip.",
    "What is 12345 plus 678?",
    "def fibonacci(n):\n    ",
    "Übersetze ins Deutsche: Good morning, how are you?",
    "请用中文介绍一下你自己。",
    "🦊 Tell me about foxes 🦊",
    "Once upon a time",
    "A",
]
# Slices of real prose, in tokens.
LENGTHS = [2, 15, 16, 17, 60, 520]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(embedded_folder())
    prose = tokenizer((ROOT / "LICENSE").read_text())["input_ids"]
    asked: list[list[int]] = [tokenizer(text)["input_ids"] for text in QUESTIONS]
    return asked + [prose[length : 2 * length] for length in LENGTHS]


@pytest.fixture(scope="module")
def pair_of_pairs(
    shallow: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ProcessCluster]:
    """Two prefill and two decode workers, used in turn, with other sizes than the defaults."""
    tree: dict[str, object] = {
        "page_size": 5,
        "prefill": {"kv_memory": "32MiB", "chunk_tokens": 100, "threads": 1},
        "decode": {"kv_memory": "32MiB", "max_batch": 6, "threads": 1},
        "router": {"policy": "round_robin"},
    }
    workspace = tmp_path_factory.mktemp("pairs")
    with ProcessCluster(shallow, workspace, prefill=2, decode=2, tree=tree) as cluster:
        yield cluster
        cluster.wait_idle()


def ask_together(
    cluster: ProcessCluster, prompts: list[list[int]], **options: float | bool
) -> list[Answer]:
    with cluster.client() as client, ThreadPoolExecutor(len(prompts)) as threads:
        return list(
            threads.map(
                lambda prompt: client.generate(prompt, max_tokens=ANSWER, **options), prompts
            )
        )


def greedy(cluster: ProcessCluster, prompts: list[list[int]]) -> list[tuple[int, ...]]:
    return [answer.token_ids for answer in ask_together(cluster, prompts, ignore_eos=True)]


def test_greedy_tokens_equal_transformers(
    embedded: ProcessCluster, prompts: list[list[int]]
) -> None:
    """It reads each answer once: if it would choose every token after those before, they are its
    own, and it need not write them one by one."""
    oracle: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        embedded_folder(), dtype=torch.float32
    )
    for prompt, found in zip(prompts, greedy(embedded, prompts), strict=True):
        answer = list(found)
        with torch.inference_mode():
            context = torch.tensor([prompt + answer[:-1]])
            logits = oracle(context, logits_to_keep=len(answer)).logits[0]
        assert logits.argmax(-1).tolist() == answer


def test_greedy_tokens_are_the_same_on_more_workers_with_other_sizes(
    shallow_pair: ProcessCluster, pair_of_pairs: ProcessCluster, prompts: list[list[int]]
) -> None:
    answers = ask_together(pair_of_pairs, prompts, ignore_eos=True)
    assert [answer.token_ids for answer in answers] == greedy(shallow_pair, prompts)
    assert {answer.prefill_worker for answer in answers} == {"prefill-0", "prefill-1"}
    assert {answer.decode_worker for answer in answers} == {"decode-0", "decode-1"}


def test_sampled_tokens_depend_on_the_seed_alone(
    shallow_pair: ProcessCluster, pair_of_pairs: ProcessCluster, prompts: list[list[int]]
) -> None:
    """Alone, in a busy batch, and on another cluster: the same seed, the same tokens."""
    options = {"temperature": 0.9, "top_p": 0.95, "seed": 17, "repetition_penalty": 1.1}
    options["ignore_eos"] = True  # an answer of one token says little
    asked = prompts[:6]
    with shallow_pair.client() as client:
        alone = [client.generate(prompt, max_tokens=ANSWER, **options) for prompt in asked[:3]]
        other = client.generate(asked[1], max_tokens=ANSWER, **{**options, "seed": 18})
    busy = ask_together(shallow_pair, asked, **options)
    elsewhere = ask_together(pair_of_pairs, asked, **options)
    assert [answer.token_ids for answer in busy[:3]] == [answer.token_ids for answer in alone]
    assert [answer.token_ids for answer in busy] == [answer.token_ids for answer in elsewhere]
    assert other.token_ids != alone[1].token_ids
