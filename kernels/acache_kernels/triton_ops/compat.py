"""What differs between Triton's compiler and its interpreter."""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def operand(x):
    """An operand of `tl.dot`: as it is, but widened for the interpreter, whose dot misreads bfloat16."""
    if INTERPRETED:
        return x.to(tl.float32)
    else:
        return x
