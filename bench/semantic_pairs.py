"""How well an embedding model tells paraphrases from look-alikes: `python -m bench.semantic_pairs
--model FOLDER`.

Each line of semantic_pairs.txt has a question, a paraphrase (which has the same answer) and two
look-alikes (which have another answer: another number or name, a negation, the opposite, another
attribute). For some least similarities it prints how many paraphrases would be answered from the
cache (recall), and how many of all hits would be right (precision); then the similarities that
`baton cache report` would propose for some shares of false hits.

With --verify MODEL a cluster serves that model, which verifies each pair with a similarity of at
least --least, as with `cache.semantic_verify_seconds`. Then the hits that remain, their precision
and the time of one verification are printed too.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from baton import Client
from baton.core.metrics import Spread
from baton.engine.encoder import Encoder
from baton.router.prompts.embedding_model import EmbeddingModel
from baton.router.response_cache.shadow import THRESHOLDS, JudgedHit, propose_similarity
from baton.router.response_cache.similar_questions import cosine
from baton.router.response_cache.verification import OTHER, SAME, verification_chat
from bench.processes import FREE_ROUTER, router, workers

RATES = (0.01, 0.02, 0.05, 0.1, 0.2)
LINES = Path(__file__).with_suffix(".txt")


class Pair(NamedTuple):
    one: str
    other: str
    same: bool


def read_pairs() -> list[Pair]:
    pairs = []
    for line in LINES.read_text().splitlines():
        question, paraphrase, *look_alikes = line.split(" | ")
        pairs.append(Pair(question, paraphrase, True))
        pairs += [Pair(question, each, False) for each in look_alikes]
    return pairs


def judge(pairs: Sequence[Pair], folder: Path) -> list[JudgedHit]:
    """Turns each pair into a hit with its similarity."""
    text, encoder = EmbeddingModel.load(str(folder)).text, Encoder(folder)

    def vectors(texts: Iterable[str]) -> list[bytes]:
        return [encoder.embed([text.encode(each)])[0].numpy().tobytes() for each in texts]

    ones, others = vectors(pair.one for pair in pairs), vectors(pair.other for pair in pairs)
    return [
        JudgedHit(cosine(one, other), not pair.same)
        for pair, one, other in zip(pairs, ones, others, strict=True)
    ]


def confirms(client: Client, pair: Pair, tokens: Sequence[int]) -> bool:
    """Asks the model as router/requests/question_requests.py does. True if it confirms the pair."""
    messages = [(each.role, each.content) for each in verification_chat(*pair[:2]).messages]
    biases = dict.fromkeys(tokens, 100.0)
    answer = client.chat(messages, max_tokens=1, temperature=0.0, logit_bias=biases)
    return answer.token_ids[0] == tokens[0]


def verify(pairs: Sequence[Pair], model: str) -> list[bool]:
    """Which pairs the model confirms."""
    tree: dict[str, object] = {"model": model, "router": FREE_ROUTER}
    confirmed, taken = [], []
    with (
        tempfile.TemporaryDirectory() as logs,
        workers(Path(logs), tree, ["prefill-0", "decode-0"]) as started,
        router(Path(logs), tree, started.values()) as served,
        Client(served.address) as client,
    ):
        tokens = [client.tokenize(word).token_ids[-1] for word in (SAME, OTHER)]
        for pair in pairs:
            began = time.perf_counter()
            confirmed.append(confirms(client, pair, tokens))
            taken.append(1000 * (time.perf_counter() - began))
    spread = Spread.of(taken)
    print(f"milliseconds of a verification: p50 {spread.p50:.0f}, p99 {spread.p99:.0f}")
    return confirmed


def report_verified(
    pairs: Sequence[Pair], hits: Sequence[JudgedHit], model: str, least: float
) -> None:
    chosen = [(pair, hit) for pair, hit in zip(pairs, hits, strict=True) if hit.similarity >= least]
    confirmed = verify([pair for pair, _ in chosen], model)
    kept = [hit for (_, hit), yes in zip(chosen, confirmed, strict=True) if yes]
    print(f"verified by {Path(model).name}: {len(chosen) - len(kept)} of {len(chosen)} refused")
    print(f"{'similarity':>10} {'hits':>6} {'precision':>9} {'recall':>9}")
    paraphrases = sum(not hit.false for hit in hits)
    for each in (threshold for threshold in THRESHOLDS if threshold >= least):
        print(row(kept, each, paraphrases))


def row(hits: Sequence[JudgedHit], least: float, all_right: int) -> str:
    """The row of hits with at least a similarity; `all_right` counts the paraphrases of all
    pairs."""
    over = [hit for hit in hits if hit.similarity >= least]
    right = sum(not hit.false for hit in over)
    precision = f"{right / len(over):9.1%}" if over else f"{'-':>9}"
    return f"{least:10.4f} {len(over):6} {precision} {right / all_right:9.1%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="a sentence-transformers folder")
    parser.add_argument("--verify", metavar="MODEL", help="a model that verifies, or `embedded`")
    parser.add_argument("--least", type=float, default=0.8, help="least similarity to verify")
    arguments = parser.parse_args()
    pairs = read_pairs()
    hits = judge(pairs, arguments.model)
    same = sum(not hit.false for hit in hits)
    print(f"{len(hits)} pairs: {same} paraphrases, {len(hits) - same} look-alikes")
    print(f"{'similarity':>10} {'hits':>6} {'precision':>9} {'recall':>9}")
    for least in THRESHOLDS:
        print(row(hits, least, same))
    print("proposed for a share of false hits:")
    for rate in RATES:
        proposed = propose_similarity(hits, rate)
        print(
            f"{rate:5.0%} " + (row(hits, proposed, same) if proposed is not None else "      none")
        )
    if arguments.verify:
        report_verified(pairs, hits, arguments.verify, arguments.least)


if __name__ == "__main__":
    main()
