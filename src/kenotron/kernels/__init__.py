"""Functions with fast paths, each with a plain reference, and counter-based random numbers.

attention.py                causal attention by documents, with the path that is fastest by measurement
attentions/                 the functions that `_attn_implementation` chooses from
blockwise_attention.py      attention over some of the keys, with the log-sum-exp that merges blocks
products.py                 matrix products, in fp32 through oneDNN where that is faster
experts.py, token_slots.py  the feed-forward of a mixture of experts
linear_cross_entropy.py     the head's matrix product and its loss in one function
selective_scan.py, state_space_dual.py, causal_conv.py     the recurrences of Mamba and Mamba-2 by chunks
rms_norm.py, rope.py, swiglu.py     elementwise kernels with explicit backward
fused.py, triton/, mamba_packages.py     GPU kernels that replace these functions, in one launch
hashing.py, random.py, quantiles.py     random numbers as functions of (key, counter): integers, tensors, normals
tensor_shard.py             a rank's block of a global tensor
bfloat16.py                 tells where products in bfloat16 are fast
cores.py                    counts the processor cores of this process
host_memory.py              tunes glibc's malloc for repeated steps
shortcuts.py                tells when a kernel may take a shortcut: small tensors, and values that are free to read
"""
