"""Tell where bfloat16 matrix products are faster than float32's.

GFLOP/s of ``[4096, 256] x [256, 768]``, 2 cores:

    GPUs                                tensor cores
    Xeon with AMX                       bfloat16 far ahead (5x at [384, 1024], 1 thread)
    Xeon with avx512_bf16, AMX masked   bfloat16 145, float32 280
    EPYC with avx512_bf16               the instruction does twice the work of a float32 one
    other CPUs                          bfloat16 is emulated
"""

import torch


def bfloat16_is_fast(device: torch.device) -> bool:
    """Return whether `device` multiplies bfloat16 matrices faster than float32 ones. False if torch cannot tell."""
    if device.type != "cpu":
        return True
    capabilities = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    return bool(
        capabilities.get("amx_bf16") or (capabilities.get("avx512_bf16") and "AMD" in capabilities.get("cpu_name", ""))
    )
