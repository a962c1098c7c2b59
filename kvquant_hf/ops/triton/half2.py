"""Arithmetic on pairs of float16 held in int32 words.

Codes leave their words two at a time and stay pairs until a matrix product wants them, so that one 32-bit
instruction serves two elements. `ASM` picks PTX instructions; without it the same is said in plain Triton, for
processors that are no NVIDIA GPU.
"""

import triton
import triton.language as tl


@triton.jit
def low(x):
    """The lower float16 of each word."""
    return x.to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def high(x):
    """The upper float16 of each word."""
    return (x >> 16).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def pair(lower, upper):
    """Words of two float16 tensors."""
    bits = lower.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return bits | (upper.to(tl.int16, bitcast=True).to(tl.int32) << 16)


@triton.jit
def and_or(x, mask, bits, ASM: tl.constexpr):
    """`x & mask | bits`: one instruction, which the compiler does not find where both operands are constants."""
    if ASM:
        return tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, $2, $3, 0xEA;", "=r,r,r,r", [x, mask, bits], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        return (x & mask) | bits


@triton.jit
def minus(x, NUMBER: tl.constexpr, BITS: tl.constexpr, ASM: tl.constexpr):
    """`x - NUMBER`, whose float16 pattern is `BITS`."""
    if ASM:
        return tl.inline_asm_elementwise(
            "sub.rn.f16x2 $0, $1, $2;", "=r,r,r", [x, BITS * 0x10001], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        return pair(low(x) - NUMBER, high(x) - NUMBER)


@triton.jit
def mul2(x, y, ASM: tl.constexpr):
    """`x · y`."""
    if ASM:
        return tl.inline_asm_elementwise(
            "mul.rn.f16x2 $0, $1, $2;", "=r,r,r", [x, y], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        return pair(low(x) * low(y), high(x) * high(y))


@triton.jit
def fma2(x, y, z, ASM: tl.constexpr):
    """`x · y + z`, rounded once."""
    if ASM:
        return tl.inline_asm_elementwise(
            "fma.rn.f16x2 $0, $1, $2, $3;", "=r,r,r,r", [x, y, z], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        return pair(tl.fma(low(x), low(y), low(z)), tl.fma(high(x), high(y), high(z)))


@triton.jit
def fms2(x, y, z, w, ASM: tl.constexpr):
    """`x · y - z · w`, the second product rounded first."""
    if ASM:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 t; mul.rn.f16x2 t, $3, $4; neg.f16x2 t, t; fma.rn.f16x2 $0, $1, $2, t; }",
            "=r,r,r,r,r",
            [x, y, z, w],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        lower = tl.fma(low(x), low(y), -(low(z) * low(w)))
        return pair(lower, tl.fma(high(x), high(y), -(high(z) * high(w))))


@triton.jit
def doubled_low(x, ASM: tl.constexpr):
    """The lower float16 of each word, in both halves."""
    if ASM:
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $1, 0x1010;", "=r,r", [x], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        return (x & 0xFFFF) | (x << 16)


@triton.jit
def doubled_high(x, ASM: tl.constexpr):
    """The upper float16 of each word, in both halves."""
    if ASM:
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $1, 0x3232;", "=r,r", [x], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        return ((x >> 16) & 0xFFFF) | (x & -65536)


@triton.jit
def shifted(x, LEFT: tl.constexpr):
    """Shift left by a constant, right if it is negative."""
    if LEFT > 0:
        return x << LEFT
    elif LEFT < 0:
        return x >> -LEFT
    else:
        return x


@triton.jit
def plane(w, tops, PLANE: tl.constexpr, NBITS: tl.constexpr, SYMMETRIC: tl.constexpr, ASM: tl.constexpr):
    """Codes of one plane of words as pairs of float16, less their middle where they are symmetric.

    A code that lies at bit `P` of the mantissa of a float16 with exponent `10 - P` makes `2**(10 - P) + code`, and
    taking that power away is exact. Planes whose codes lie within the 10 bits of a mantissa need no shift, the others
    share one; nothing is converted from integers. For 3 bits `tops` holds the top bit of the code at bit `2 · PLANE`.
    """
    ONES: tl.constexpr = 0x10001
    WIDTH: tl.constexpr = 2 if NBITS == 3 else NBITS
    PER_SHIFT: tl.constexpr = (10 - NBITS) // WIDTH + 1
    SHIFT: tl.constexpr = PLANE // PER_SHIFT * PER_SHIFT * WIDTH
    BIT: tl.constexpr = PLANE * WIDTH - SHIFT
    EXPONENT: tl.constexpr = (25 - BIT) * 1024
    MASK: tl.constexpr = ((1 << WIDTH) - 1) * (1 << BIT)
    x = and_or(shifted(w, -SHIFT), MASK * ONES, EXPONENT * ONES, ASM)
    if NBITS == 3:
        x = and_or(shifted(tops, 2 - SHIFT), (1 << (BIT + 2)) * ONES, x, ASM)
    if SYMMETRIC:
        LEVELS: tl.constexpr = (1 << NBITS) - 1
        if BIT > 0:
            return minus(x, 2.0 ** (10 - BIT) + LEVELS / 2, EXPONENT + LEVELS * (1 << BIT) // 2, ASM)
        else:  # above 1024 halves have no place
            HALF_BITS: tl.constexpr = (13 + NBITS) * 1024 + (LEVELS * (1 << (11 - NBITS)) - 1024)
            return minus(minus(x, 1024.0, EXPONENT, ASM), LEVELS / 2, HALF_BITS, ASM)
    else:
        return minus(x, 2.0 ** (10 - BIT), EXPONENT, ASM)


@triton.jit
def planes(
    w,
    tops,
    FIRST: tl.constexpr,
    COUNT: tl.constexpr,
    STEP: tl.constexpr,
    NBITS: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    ASM: tl.constexpr,
):
    """`COUNT` planes of words `[N, W]`, every `STEP`-th from `FIRST`: pairs `[N, W, COUNT]`."""
    if COUNT == 1:
        return plane(w, tops, FIRST, NBITS, SYMMETRIC, ASM)[:, :, None]
    elif COUNT == 2:
        return tl.join(
            plane(w, tops, FIRST, NBITS, SYMMETRIC, ASM), plane(w, tops, FIRST + STEP, NBITS, SYMMETRIC, ASM)
        )
    else:
        # The last axis of a join comes from its two arguments: even planes, then odd ones.
        even = planes(w, tops, FIRST, COUNT // 2, 2 * STEP, NBITS, SYMMETRIC, ASM)
        odd = planes(w, tops, FIRST + STEP, COUNT // 2, 2 * STEP, NBITS, SYMMETRIC, ASM)
        return tl.reshape(tl.join(even, odd), [w.shape[0], w.shape[1], COUNT])


@triton.jit
def halves(x, ASM: tl.constexpr):
    """Pairs `[N, C]` as float16 `[N, 2·C]`, ready for a matrix product."""
    flat = tl.reshape(tl.join(low(x), high(x)), [x.shape[0], 2 * x.shape[1]])
    if ASM:
        # Where an operand comes from a join, Triton 3.6 takes it for 8-bit data and gives up ldmatrix for it. A move
        # that claims an effect ends its search; the assembler drops it.
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [flat], dtype=tl.float16, is_pure=False, pack=2)
    else:
        return flat
