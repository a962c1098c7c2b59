"""Quantizing and packing in one pass: raw keys and values to words, with the codes that `AffineQuantizer` gives.

Bit for bit: the same formulas in the same order, divisions correctly rounded, and no fused multiply-adds (the launcher
switches them off), since one unit in the last place can move a code. Sizes: `L` tokens of a block, `D` channels (a
power of two), `DW` words of a row, `TOPS` words of top bits of 3-bit codes.
"""

import triton
import triton.language as tl

from kvquant_hf.ops.triton.blocks_kernel import channel_of_place
from kvquant_hf.ops.triton.combine_kernel import hadamard_stage

HALF_MAX = tl.constexpr(65504.0)
HALF_SMALL_SCALE = tl.constexpr(2.0**-16)
TINY = tl.constexpr(2.0**-126)
# Added and taken away again, this rounds to whole numbers, halves to even ones.
ROUNDER = tl.constexpr(12582912.0)


@triton.jit
def rounded_half(values, UP: tl.constexpr):
    """Bits (int32) of float32 values rounded up or down to float16, never to infinity."""
    nearest = values.to(tl.float16)
    bits = nearest.to(tl.int16, bitcast=True).to(tl.int32)
    magnitude = bits & 0x7FFF
    negative = bits < 0
    if UP:
        wrong = nearest.to(tl.float32) < values
        moved = magnitude + tl.where(negative, -1, 1)
    else:
        wrong = nearest.to(tl.float32) > values
        moved = magnitude + tl.where(negative, 1, -1)
    crossed = moved < 0  # from zero to the smallest number of the other sign
    neighbour = tl.where(crossed, 1, moved) | tl.where(negative ^ crossed, 0x8000, 0)
    return tl.where(wrong & ((neighbour & 0x7C00) != 0x7C00), neighbour, bits) & 0xFFFF


@triton.jit
def as_float(bits):
    """Float32 values of float16 bits (int32)."""
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def parameters(low, high, NBITS: tl.constexpr, SYMMETRIC: tl.constexpr, LIMIT: tl.constexpr):
    """Bits of scales and zero points of groups, and whether float16 does not serve them."""
    if SYMMETRIC:
        LEVELS: tl.constexpr = 2.0**NBITS - 1
        high = tl.maximum(high, -low)
        low = -high
        zero_bits = (low * 0).to(tl.int32)
        scale_bits = rounded_half(tl.div_rn(high, tl.full(high.shape, LEVELS / 2, tl.float32)), True)
    else:
        LEVELS: tl.constexpr = 2.0**NBITS - 1
        zero_bits = rounded_half(low, False)
        levels = tl.full(high.shape, LEVELS, tl.float32)
        scale_bits = rounded_half(tl.div_rn(high, levels) - tl.div_rn(as_float(zero_bits), levels), True)
    levels = tl.full(high.shape, LEVELS, tl.float32)
    extent = tl.maximum(high, -low)
    spread = tl.div_rn(high, levels) - tl.div_rn(low, levels)
    small = (spread > 0) & (spread < HALF_SMALL_SCALE) & (spread * 1024 > extent)
    reach = as_float(scale_bits) * 2.0**NBITS + tl.abs(as_float(zero_bits))
    return scale_bits, zero_bits, (extent > HALF_MAX) | small | (reach > LIMIT)


@triton.jit
def codes_of(x, scale, zero_point, NBITS: tl.constexpr, SYMMETRIC: tl.constexpr):
    """Codes (int32) of values against their stored parameters, all float32 that broadcast."""
    inverse = tl.where(scale >= TINY, tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale), 0.0)
    if SYMMETRIC:
        LEVELS: tl.constexpr = 2.0**NBITS - 1
        level = tl.minimum(tl.maximum(x * inverse + LEVELS / 2, 0.0), LEVELS)
        return ((level + ROUNDER) - ROUNDER).to(tl.int32)
    else:
        level = tl.minimum(tl.maximum((x - zero_point) * inverse, 0.0), 2.0**NBITS - 1)
        return ((level + ROUNDER) - ROUNDER).to(tl.int32)


@triton.jit
def folded_tops(tops, N: tl.constexpr, DW: tl.constexpr, TOPS: tl.constexpr):
    """Top bits of words `[N, DW]` into words `[N, TOPS]`: those of the second half one bit higher."""
    if DW == TOPS:
        return tops
    else:
        parts = tl.reshape(tops, [N, 2, TOPS])
        return tl.sum(parts << tl.arange(0, 2)[None, :, None], axis=1)


@triton.jit
def quantize_keys_kernel(
    states,
    codes,
    metadata,
    flag,
    start_table,
    offset_table,
    first_start,
    states_b,
    states_h,
    states_t,
    NBITS: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    LIMIT: tl.constexpr,
    L: tl.constexpr,
    D: tl.constexpr,
    DW: tl.constexpr,
    TOPS: tl.constexpr,
    ROTARY: tl.constexpr,
    OFFSET: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """One block of one head, grid `(n, H, B)`; a group is the `L` tokens of a channel.

    Args:
        states: Keys `[B, H, n·L, D]` as the model rotated them.
        codes: int32 `[B, H, n, L, DW + TOPS]`.
        metadata: float16 `[B, H, n, 1, 2·D]` (symmetric: `D`).
        flag: int32 `[1]`, set where float16 parameters do not serve.
        start_table: float32 `[…, 2, ROTARY / 2]`: cosines and sines of block starts, from row `first_start` on.
        offset_table: float32 `[L, 2, ROTARY / 2]`: of offsets in a block.
        first_start: See `start_table`.
        states_b: Stride of `states` over `B`, elements.
        states_h: Over `H`.
        states_t: Over tokens.
        NBITS: Bits of a code.
        SYMMETRIC: Whether there are no zero points.
        LIMIT: Largest magnitude that the decode kernel takes.
        L: Tokens of a block.
        D: Channels.
        DW: Words of a row that hold planes.
        TOPS: Words of a row that hold top bits of 3-bit codes, else 0.
        ROTARY: Rotated channels.
        OFFSET: The first of them.
        INTERLEAVED: Whether pairs are neighbours.
    """
    WIDTH: tl.constexpr = 2 if NBITS == 3 else NBITS
    HALF_PLANES: tl.constexpr = 8 // WIDTH
    block = tl.program_id(0)
    unit = (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)).to(tl.int64) * tl.num_programs(0) + block
    rows = states + tl.program_id(2).to(tl.int64) * states_b + tl.program_id(1).to(tl.int64) * states_h
    token = tl.arange(0, L)
    rows = rows + (block.to(tl.int64) * L + token)[:, None, None] * states_t
    word = tl.arange(0, DW)
    half = tl.arange(0, 2)
    words = tl.zeros([L, DW], tl.int32)
    tops = tl.zeros([L, DW], tl.int32)
    for low_plane in tl.static_range(0, HALF_PLANES):
        place = 2 * (low_plane * DW + word[:, None]) + half[None, :]
        channel = channel_of_place(place, D, ROTARY, OFFSET, INTERLEAVED)
        partner = channel_of_place(place + D // 2, D, ROTARY, OFFSET, INTERLEAVED)
        x = tl.load(rows + channel[None, :, :]).to(tl.float32)
        y = tl.load(rows + partner[None, :, :]).to(tl.float32)
        if ROTARY:
            rotated = (place < ROTARY // 2)[None, :, :]
            start = start_table + (first_start + block) * ROTARY + place[None, :, :]
            offset = offset_table + token[:, None, None] * ROTARY + place[None, :, :]
            cos_a = tl.load(start, mask=rotated, other=1.0)
            sin_a = tl.load(start + ROTARY // 2, mask=rotated, other=0.0)
            cos_b = tl.load(offset, mask=rotated, other=1.0)
            sin_b = tl.load(offset + ROTARY // 2, mask=rotated, other=0.0)
            cosine = cos_a * cos_b - sin_a * sin_b
            sine = sin_a * cos_b + cos_a * sin_b
            x, y = x * cosine + y * sine, y * cosine - x * sine
        for side in tl.static_range(0, 2):
            values = x if side == 0 else y
            scale_bits, zero_bits, wide = parameters(tl.min(values, 0), tl.max(values, 0), NBITS, SYMMETRIC, LIMIT)
            tl.atomic_or(flag + tl.zeros([DW, 2], tl.int32), wide.to(tl.int32), mask=wide)
            found = codes_of(
                values, as_float(scale_bits)[None, :, :], as_float(zero_bits)[None, :, :], NBITS, SYMMETRIC
            )
            shift = (low_plane + side * HALF_PLANES) * WIDTH + 16 * half[None, None, :]
            words |= tl.sum((found & (2**WIDTH - 1)) << shift, axis=2)
            if NBITS == 3:
                tops |= tl.sum((found >> 2) << shift, axis=2)
            target = metadata + unit * (D if SYMMETRIC else 2 * D) + side * (D // 2) + place
            tl.store(target, scale_bits.to(tl.int16).to(tl.float16, bitcast=True))
            if not SYMMETRIC:
                tl.store(target + D, zero_bits.to(tl.int16).to(tl.float16, bitcast=True))
    out = codes + (unit * L + token)[:, None] * (DW + TOPS)
    tl.store(out + word[None, :], words)
    if NBITS == 3:
        tl.store(out + DW + tl.arange(0, TOPS)[None, :], folded_tops(tops, L, DW, TOPS))


@triton.jit
def quantize_values_kernel(
    states,
    codes,
    metadata,
    flag,
    num_tokens,
    states_b,
    states_h,
    states_t,
    NBITS: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    LIMIT: tl.constexpr,
    D: tl.constexpr,
    DW: tl.constexpr,
    TOPS: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    ROOT: tl.constexpr,
    BT: tl.constexpr,
):
    """`BT` tokens of one head, grid `(⌈n·L / BT⌉, H, B)`; a group is `GROUP` channels of a token.

    Args:
        states: Values `[B, H, n·L, D]`.
        codes: int32 `[B, H, n, L, DW + TOPS]`.
        metadata: int32 `[B, H, n, L, D / GROUP]`, the scale low and the zero point high (symmetric: float16).
        flag: int32 `[1]`, set where float16 parameters do not serve.
        num_tokens: `n·L`.
        states_b: Stride of `states` over `B`, elements.
        states_h: Over `H`.
        states_t: Over tokens.
        NBITS: Bits of a code.
        SYMMETRIC: Whether there are no zero points.
        LIMIT: Largest magnitude that the decode kernel takes.
        D: Channels.
        DW: Words of a row that hold planes.
        TOPS: Words of a row that hold top bits of 3-bit codes, else 0.
        GROUP: Channels of a group, at most `D`.
        WIDTH: Size of the Hadamard blocks that values are rotated by, 0 for none.
        ROOT: Square root of it.
        BT: Tokens of a program.
    """
    BITS: tl.constexpr = 2 if NBITS == 3 else NBITS
    PLANES: tl.constexpr = 16 // BITS
    NG: tl.constexpr = D // GROUP
    unit = (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)).to(tl.int64) * num_tokens
    token = tl.program_id(0) * BT + tl.arange(0, BT)
    live = token < num_tokens
    rows = states + tl.program_id(2).to(tl.int64) * states_b + tl.program_id(1).to(tl.int64) * states_h
    rows = rows + token.to(tl.int64) * states_t
    x = tl.load(rows[:, None] + tl.arange(0, D)[None, :], mask=live[:, None], other=0.0).to(tl.float32)
    if WIDTH:
        x = tl.reshape(x, [BT * D])  # blocks of `WIDTH` channels never reach over a token
        for stage in tl.static_range(0, 8):
            if 2 ** (stage + 1) <= WIDTH:
                x = hadamard_stage(x, 2**stage, BT * D)
        x = tl.div_rn(x, tl.full([BT * D], ROOT, tl.float32))
    x = tl.reshape(x, [BT, NG, GROUP])
    scale_bits, zero_bits, wide = parameters(tl.min(x, 2), tl.max(x, 2), NBITS, SYMMETRIC, LIMIT)
    tl.atomic_or(flag + tl.zeros([BT, NG], tl.int32), wide.to(tl.int32), mask=wide)
    found = codes_of(x, as_float(scale_bits)[:, :, None], as_float(zero_bits)[:, :, None], NBITS, SYMMETRIC)
    found = tl.reshape(found, [BT, PLANES, DW, 2])
    shift = tl.arange(0, PLANES)[None, :, None, None] * BITS + 16 * tl.arange(0, 2)[None, None, None, :]
    words = tl.sum(tl.sum((found & (2**BITS - 1)) << shift, axis=3), axis=1)
    out = codes + (unit + token)[:, None] * (DW + TOPS)
    tl.store(out + tl.arange(0, DW)[None, :], words, mask=live[:, None])
    if NBITS == 3:
        tops = tl.sum(tl.sum((found >> 2) << shift, axis=3), axis=1)
        tl.store(out + DW + tl.arange(0, TOPS)[None, :], folded_tops(tops, BT, DW, TOPS), mask=live[:, None])
    target = metadata + (unit + token)[:, None] * NG + tl.arange(0, NG)[None, :]
    if SYMMETRIC:
        tl.store(target, scale_bits.to(tl.int16).to(tl.float16, bitcast=True), mask=live[:, None])
    else:
        tl.store(target, scale_bits | (zero_bits << 16), mask=live[:, None])
