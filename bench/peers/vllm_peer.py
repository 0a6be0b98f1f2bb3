"""vLLM on a CPU as a peer of bench.engine: answers JSON lines (bench/peers/__init__.py).

PYTHON vllm_peer.py FOLDER DTYPE THREADS
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

CONTEXT = 2200


def main() -> None:
    folder, dtype, threads = sys.argv[1:]
    cores = sorted(os.sched_getaffinity(0))[: int(threads)]
    os.environ |= {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_CPU_KVCACHE_SPACE": "2",
        # In this process, whose CPU time is measured.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    import torch
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    torch.set_num_threads(int(threads))
    engine: Any = LLM(
        folder,
        dtype=dtype,
        max_model_len=CONTEXT,
        max_num_batched_tokens=CONTEXT,
        max_num_seqs=16,
        enable_prefix_caching=False,
    )
    print("ready", flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        count = asked["count"]
        engine.generate(
            [{"prompt_token_ids": prompt} for prompt in asked["prompts"]],
            SamplingParams(
                temperature=0.0,
                max_tokens=count,
                min_tokens=count,
                ignore_eos=True,
                detokenize=False,
            ),
            use_tqdm=False,
        )
        print("done", flush=True)


if __name__ == "__main__":
    main()
