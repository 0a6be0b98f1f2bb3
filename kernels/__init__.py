"""The arithmetic of a step: attention, linear layers, norms, rotation, sampling.

attention, cache and linear run on code that cpu/ compiles, or on torch where it cannot; gpu/
has the Triton kernels.
"""
