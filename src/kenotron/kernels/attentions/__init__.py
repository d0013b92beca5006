"""Attention functions that `_attn_implementation` chooses from; each takes the arguments of `kernels.attention`.

choice.py       the rule: facts about device, dtype and shapes → a function, or why not
packed.py       flash attention over packed documents in one call: torch's varlen, the package flash_attn
flex.py         torch's flex_attention, compiled where there is a GPU
masked.py       one call with a mask: torch's SDPA, and explicit matrix products (eager)
documents.py    document borders as tensors on the device

All compute the same: causal attention inside each document, with a sliding window and a softcap where they have them.
Nothing here is imported before a run has chosen it.
"""
