"""Attention functions that `_attn_implementation` chooses from; each takes the arguments of `kernels.attention`.

choice.py       the rule: facts about device, dtype and shapes → a function, or the reason why not
packed.py       flash attention over packed documents in one call: torch's varlen, the package flash_attn
flex.py         torch's flex_attention, compiled on a GPU
masked.py       one call with a mask: torch's SDPA, and explicit matrix products (eager)
documents.py    document borders as tensors on the device

All compute the same causal attention within each document; some support a sliding window and a softcap. A file is
imported only when a run has chosen it.
"""
