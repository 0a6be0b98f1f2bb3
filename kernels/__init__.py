"""The arithmetic of a step: attention, linear layers, norms, rotation, sampling.

attention, cache and linear use code that cpu/ compiles, or torch where it cannot compile; gpu/ has
the Triton kernels.
"""

SCALE_BYTES = 4
"""Bytes of the float32 scale behind the codes of a key or value (kernels/integers.py)."""

GPU_SCALE_BYTES = 16
"""The same on a GPU, padded so that the next codes are aligned: it loads 16 bytes at a time."""
