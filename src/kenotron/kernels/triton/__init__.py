"""Kernels in Triton, for GPUs; the reference of each is a plain function in `kernels`.

rms_norm.py, swiglu.py, rope.py     one launch each, forward and backward
experts.py                          SwiGLU weighed, one launch each way, and the sum over a token's experts
cross_entropy.py                    the passes over the logits, in one launch

`kernels.fused` imports them when they are asked for (``model.kernels: triton``) and there is a GPU. Without one their
numbers are tested in Triton's interpreter, in fp32, and tests/support/triton_compile.py compiles them for its targets.
"""
