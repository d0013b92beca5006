"""Triton kernels for GPUs; the reference of each is a plain function in `kernels`.

rms_norm.py, swiglu.py, rope.py     one launch each, forward and backward
experts.py                          weighted SwiGLU, one launch each way, and the sum over a token's experts
cross_entropy.py                    the passes over the logits, in one launch

`kernels.fused` imports them if the config chooses them (``model.kernels: triton``) and there is a GPU. Without a GPU,
tests run them in Triton's interpreter, in fp32, and tests/support/triton_compile.py compiles them for its targets.
"""
