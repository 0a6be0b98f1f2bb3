"""The quality that a model loses by its dtype or quantization, on a fixed text.

    python -m bench.quality [--model FOLDER] [--dtype bfloat16] [--quantization int8]
        [--kv-dtype int8]

The model and itself in float32 predict the same text (engine/quality.txt), each token from the true
ones before it. The table has, by depth, the perplexity and its change, the mean and the 99.9th
percentile of the changes of tokens' log probabilities, and the share of positions where both find
the same token likeliest.
"""

from __future__ import annotations

import argparse

from baton.core import model_store
from baton.engine.quality import Quality, measure

COLUMNS = ("depth", "tokens", "perplexity", "change", "mean |d|", "99.9% |d|", "same top-1")


def print_table(quality: Quality) -> None:
    print("".join(f"{column:>14}" for column in COLUMNS))
    for each in (*quality.by_depth, quality.overall):
        cells = (
            f"{each.start:,}-{each.end:,}",
            f"{each.tokens:,}",
            f"{each.perplexity:.3f}",
            f"{each.perplexity_change:+.2%}",
            f"{each.mean_change:.4f}",
            f"{each.worst_change:.3f}",
            f"{each.top_agreement:.2%}",
        )
        print("".join(f"{cell:>14}" for cell in cells))
    before = quality.recalled_in_float32
    print(f"facts recalled: {quality.recalled} of {quality.facts}, {before} in float32")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", default=model_store.EMBEDDED, help="a folder or a GGUF file")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="bfloat16")
    parser.add_argument("--quantization", choices=["none", "int8", "int4", "fp8"], default="none")
    parser.add_argument("--kv-dtype", choices=["auto", "int8", "int4", "fp8"], default="auto")
    options = parser.parse_args()
    folder = model_store.locate(options.model)
    kept = {name: getattr(options, name) for name in ("dtype", "quantization", "kv_dtype")}
    print_table(measure(folder, options.device, **kept))


if __name__ == "__main__":
    main()
