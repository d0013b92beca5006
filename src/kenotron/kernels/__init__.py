"""Functions with fast paths, each beside its plain reference; and the counter-based random numbers.

attention.py                causal attention by documents: picks by measured rule
attentions/                 what `_attn_implementation` chooses from
blockwise_attention.py      attention over some of the keys, with the log-sum-exp that merges blocks
products.py                 matrix products, in fp32 through oneDNN where that is faster
experts.py, token_slots.py  the feed-forward of a mixture of experts
linear_cross_entropy.py     the head's product and its loss in one function
selective_scan.py, state_space_dual.py, causal_conv.py     the recurrences of Mamba and Mamba-2 by chunks
rms_norm.py, rope.py, swiglu.py     elementwise kernels with explicit backward
fused.py, triton/, mamba_packages.py     the same for GPUs, in one launch
hashing.py, random.py, quantiles.py     a number as a function of (key, counter): integers, tensors, normals
tensor_shard.py             the block of a logical tensor that a rank holds
bfloat16.py                 where products in bfloat16 are fast
cores.py                    the processor cores of this process
host_memory.py              glibc's malloc for repeated steps
shortcuts.py                few numbers, and values that Python may look at: when a kernel leaves its usual way
"""
