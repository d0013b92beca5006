"""Compile every kernel in Triton for every GPU that is supported, on a machine without one.

    $ PYTHONPATH=tests python -m support.triton_compile
    rms_norm.forward_kernel      sm_80     cubin    9 KiB
    …

It shows that kernels compile and fit, not that they are fast or right: numbers are the interpreter's tests.
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from tempfile import NamedTemporaryFile

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kenotron.kernels.triton import cross_entropy, experts, rms_norm, rope, swiglu

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx90a": GPUTarget("hip", "gfx90a", 64),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
SHARED_MEMORY = 64 << 10  # bytes of a block on the smallest of them, AMD's
SPILLED = 64  # bytes of a thread's registers; more of them cost time (some compilers put a few there)


THREE_ROWS = ("*bf16", "*bf16", "*bf16")
ROPE = ("*bf16", "*fp32", "*fp32", "*bf16", "fp32", "i32", "i32", "i32", "i64", "i64")
VARIANTS = {  # module → (kernel, arguments' types, constants, options)
    cross_entropy: [(cross_entropy.kernel, ("*bf16", "*fp32", "*fp32", "i32", "i64"), {"BLOCK": cross_entropy.BLOCK})],
    experts: [
        (experts.forward_kernel, (*THREE_ROWS, "*bf16", "i32"), {"BLOCK": experts.BLOCK}),
        (experts.backward_kernel, (*THREE_ROWS, "*bf16", "*bf16", "*bf16", "*fp32", "i32"), {"BLOCK": experts.BLOCK}),
        (experts.sum_kernel, ("*bf16", "*i32", "*bf16", "i32"), {"SLOTS": 8, "BLOCK": experts.BLOCK}),
    ],
    rms_norm: [
        (kernel, types, {"BLOCK": block}, {"num_warps": rms_norm._warps(block)})
        for kernel, types in (
            (rms_norm.forward_kernel, (*THREE_ROWS, "*fp32", "i32", "fp32")),
            (rms_norm.backward_kernel, (*THREE_ROWS, "*fp32", "*bf16", "*fp32", "i32", "i32")),
        )
        for block in (128, 4096, 8192)
    ],
    rope: [(rope.kernel, ROPE, {"INTERLEAVED": each, "HEADS": 32, "HALF": 64}) for each in (False, True)],
    swiglu: [
        (swiglu.forward_kernel, (*THREE_ROWS, "i64"), {"BLOCK": swiglu.BLOCK}),
        (swiglu.backward_kernel, (*THREE_ROWS, "*bf16", "*bf16", "i64"), {"BLOCK": swiglu.BLOCK}),
    ],
}


def compile_all() -> Iterator[tuple[str, str, str, bytes]]:
    """(kernel, target, kind of binary, binary) of all variants. Raises what Triton raises where one fails."""
    for module, variants in VARIANTS.items():
        for kernel, types, constants, *options in variants:
            names = kernel.arg_names
            signature = {**dict(zip(names, types)), **dict.fromkeys(constants, "constexpr")}
            assert list(signature) == names, f"{kernel}: a type for each of {names}"
            source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
            for name, target in TARGETS.items():
                compiled = triton.compile(source, target=target, options=dict(*options))
                kind = "cubin" if target.backend == "cuda" else "hsaco"
                binary, shared = compiled.asm[kind], compiled.metadata.shared
                assert shared <= SHARED_MEMORY, f"{kernel} {constants} on {name}: {shared} bytes"
                spilled = _stack(binary) if kind == "cubin" else 0
                assert spilled <= SPILLED, f"{kernel} {constants} on {name}: {spilled} bytes of registers spilled"
                yield f"{module.__name__.rpartition('.')[2]}.{kernel.__name__}", name, kind, binary


def _stack(cubin: bytes) -> int:
    """Bytes of memory that a thread has for what does not fit into registers."""
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return max(map(int, re.findall(r"STACK:(\d+)", found)))


if __name__ == "__main__":
    for kernel, target, kind, binary in compile_all():
        sys.stdout.write(f"{kernel:<28} {target:<8} {kind}  {len(binary) >> 10:>4} KiB\n")
