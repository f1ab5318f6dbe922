"""Compiles the Triton kernels of Linear InfSA for GPUs that are not there: `python tests/kernels/linear_compile.py`.

Shows what each takes of a streaming multiprocessor with `-v`: bytes of shared memory, warps.
"""

import sys
from itertools import product

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from infvit.attention.kernels import linear_triton as kernels

SHARED_MEMORY = 163 * 1024
"""Bytes that an A100 gives one program; an H100 gives 227 KiB."""
WHOLE = {"tokens", "width", "dim", "heads", "tiles", "parts", "tiles_a_part"}


def compile_kernel(kernel, target, dtype, warps, pointers, stages=3, **constants):
    """Compiles one kernel; `pointers` are the arguments that point to numbers of `dtype`, the rest to float32."""
    names = [name for name in kernel.arg_names if name not in constants]
    kinds = dict.fromkeys(WHOLE, "i32") | {"scale": "fp32", "real": "*i1"} | dict.fromkeys(pointers, f"*{dtype}")
    signature = {name: kinds.get(name, "*fp32") for name in names}
    signature |= dict.fromkeys(constants, "constexpr")
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(kernel.arg_names) if name in ("width", "x")}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    return triton.compile(
        source, target=GPUTarget("cuda", target, 32), options={"num_warps": warps, "num_stages": stages}
    )


def main() -> None:
    """Width 1024 with 64 heads, as in the published model."""
    count = 0
    heads = {"HEADS": 8, "LANES": 16}
    for target, dtype in product((80, 90), ("fp16", "bf16", "fp32")):
        if (target, dtype) in ((80, "fp16"), (90, "fp32")):
            continue
        half = dtype != "fp32"
        compiled = {
            "query": compile_kernel(
                kernels._query_kernel, target, dtype, 8, {"x", "weight", "bias", "query"}, HAS_BIAS=True, HAS_REAL=True,
                TOKENS=128, STEP=64 if half else 32, PRECISION="ieee", **heads,
            ),
            "pool": compile_kernel(
                kernels._pool_kernel, target, dtype, 8, {"x", "vectors"}, HAS_REAL=True, ACTIVATION=1,
                stages=1,
                TOKENS=32 if half else 16, HEADS=16, CHANNELS=1024, PRECISION="ieee",
            ),
            "pooled gradient": compile_kernel(
                kernels._pooled_gradient_kernel, target, dtype, 4, {"query"}, TOKENS=32, **heads
            ),
            "query gradient": compile_kernel(
                kernels._query_gradient_kernel, target, dtype, 4, {"query", "out"}, TOKENS=32, **heads
            ),
        }  # fmt: skip
        for name, kernel in compiled.items():
            count += 1
            assert kernel.metadata.shared <= SHARED_MEMORY, f"{name} takes {kernel.metadata.shared} bytes"
            if "-v" in sys.argv:
                print(f"sm_{target} {dtype} {name}: {kernel.metadata.shared} bytes of shared memory")
    print(f"compiled {count} kernels")


if __name__ == "__main__":
    main()
