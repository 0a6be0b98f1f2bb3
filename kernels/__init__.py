"""The arithmetic of a step: attention, linear layers, norms, rotation, sampling.

attention, cache and linear run on code that cpu/ compiles, or on torch where it cannot; gpu/
has the Triton kernels.
"""

SCALE_BYTES = 4
"""Of the float32 scale behind the codes of a key or value (kernels/integers.py)."""

GPU_SCALE_BYTES = 16
"""The same on a GPU, with those that align the next codes: it loads 16 bytes at a time."""
