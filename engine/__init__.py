"""One device: model, weights, pages and steps.

    sequence        a request's tokens and pages, as schedulers plan them
    page_pool       leases on pages; prefix_cache: known contents
    page_groups     the pool of a model whose layers have different windows
    second_tier     evicted pages, in rows (page_memory) and files (page_files); tier_copies
    step            a plan of chunks, and what a step returns
    engine          loads a model and launches plans
    architecture    a model's shape, from its config.json (model_config); families: what differs
    weights         its tensors, from a checkpoint, for each rank; weight_codes: quantized weights
    runner          turns a plan into one batch on a CPU; gpu/ has the runner for GPUs
    recorded_steps  a CPU's steps that only decode, replayed without Python
    model           the forward pass over kernels/
    sampler         the next tokens; grammar: masks, logprobs: log probabilities
    tensor_parallel ranks that share one model
    quality         what a model loses by its dtype or quantization

Torch's allocator on Arm returns freed memory to the system after 10 ms and faults it in again
for the next layer, which costs 7% of a prefill. Torch reads the setting when it is loaded, so
`engine` must be imported first.
"""

import os

os.environ.setdefault("MIMALLOC_PURGE_DELAY", "-1")
