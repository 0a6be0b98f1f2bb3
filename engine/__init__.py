"""One device: model, weights, pages and steps.

Torch's allocator on Arm gives freed memory back to the system after 10 ms and
faults it in again for the next layer, which costs 7% of a prefill. The setting
is read when torch is loaded, so it takes effect where `engine` is imported
first.
"""

import os

os.environ.setdefault("MIMALLOC_PURGE_DELAY", "-1")
