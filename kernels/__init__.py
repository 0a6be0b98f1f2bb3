"""The arithmetic of a step: attention, linear layers, norms, rotation, sampling.

attention, cache and linear run on code that cpu/ compiles, or on torch where it cannot; gpu/
has the Triton kernels.
"""

SCALE_BYTES = 4
"""Of the float32 scale behind the int8 codes of a key or value (kernels/integers.py)."""
