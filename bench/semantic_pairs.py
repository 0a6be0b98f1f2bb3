"""How well an embedding model tells paraphrases from look-alikes: `python -m bench.semantic_pairs
--model FOLDER`.

semantic_pairs.txt has a question in each line, a paraphrase of it (the same answer will do) and two
look-alikes (it will not: another number or name, a negation, the opposite, another attribute). For
some least similarities: how many paraphrases would be answered from the cache (recall), and how
many of all hits would be right (precision). Then the similarities that `baton cache report` would
propose for some shares of false hits.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from baton.engine.encoder import Encoder
from baton.router.prompts.embedding_model import EmbeddingModel
from baton.router.response_cache.shadow import cosine
from baton.router.response_cache.shadow_report import THRESHOLDS, JudgedHit, propose_similarity

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
    """Each pair as a hit of its similarity."""
    text, encoder = EmbeddingModel.load(str(folder)).text, Encoder(folder)

    def vectors(texts: Iterable[str]) -> list[bytes]:
        return [encoder.embed([text.encode(each)])[0].numpy().tobytes() for each in texts]

    ones, others = vectors(pair.one for pair in pairs), vectors(pair.other for pair in pairs)
    return [
        JudgedHit(cosine(one, other), not pair.same)
        for pair, one, other in zip(pairs, ones, others, strict=True)
    ]


def row(hits: Sequence[JudgedHit], least: float) -> str:
    over = [hit for hit in hits if hit.similarity >= least]
    right, all_right = (sum(not hit.false for hit in some) for some in (over, hits))
    precision = f"{right / len(over):9.1%}" if over else f"{'-':>9}"
    return f"{least:10.4f} {len(over):6} {precision} {right / all_right:9.1%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="a sentence-transformers folder")
    arguments = parser.parse_args()
    hits = judge(read_pairs(), arguments.model)
    same = sum(not hit.false for hit in hits)
    print(f"{len(hits)} pairs: {same} paraphrases, {len(hits) - same} look-alikes")
    print(f"{'similarity':>10} {'hits':>6} {'precision':>9} {'recall':>9}")
    for least in THRESHOLDS:
        print(row(hits, least))
    print("proposed for a share of false hits:")
    for rate in RATES:
        proposed = propose_similarity(hits, rate)
        print(f"{rate:5.0%} " + (row(hits, proposed) if proposed is not None else "      none"))


if __name__ == "__main__":
    main()
