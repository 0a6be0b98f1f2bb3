"""The arithmetic of a step: attention, linear layers, norms, rotation, sampling.

attention, cache and linear run on torch, and on code that cpu/ compiles for 64-bit Arm; gpu/
has the Triton kernels, and reference the same functions in plain torch, to test them.
"""
