"""vLLM 0.26.0 on an H200, by shape of bench/configs: ms, ms a step, tokens a second."""

from __future__ import annotations

VLLM = {
    "llama-3.1-8b": {
        "TTFT 128": 11.7,
        "TTFT 512": 15.6,
        "TTFT 2,048": 51.2,
        "TTFT 8,192": 218.5,
        "TTFT 32,768": 1186.0,
        "step 1 x 512": 4.86,
        "step 1 x 8,192": 5.17,
        "step 8 x 512": 5.10,
        "step 32 x 512": 5.61,
        "step 32 x 2,048": 7.33,
        "step 64 x 1,024": 7.66,
        "step 128 x 512": 8.82,
        "step 256 x 512": 14.01,
        "128 at once, 1,024 in, 128 out": 3689.0,
    },
    "qwen3-30b-a3b": {
        "TTFT 128": 20.8,
        "TTFT 512": 23.6,
        "TTFT 2,048": 72.6,
        "TTFT 8,192": 151.7,
        "step 1 x 512": 4.12,
        "step 8 x 512": 9.31,
        "step 32 x 512": 15.72,
        "step 32 x 2,048": 16.8,
        "step 64 x 1,024": 19.2,
        "step 128 x 512": 19.9,
        "step 256 x 512": 23.7,
        "128 at once, 1,024 in, 128 out": 2689.0,
    },
    "deepseek-v2-lite": {
        "TTFT 128": 11.1,
        "TTFT 512": 11.6,
        "TTFT 2,048": 67.1,
        "TTFT 8,192": 99.0,
        "step 1 x 512": 3.35,
        "step 8 x 512": 3.73,
        "step 32 x 512": 4.48,
        "step 64 x 1,024": 5.13,
        "step 256 x 512": 7.56,
    },
}
