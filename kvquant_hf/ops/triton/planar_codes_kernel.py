"""Reading the common layout number by number: from a place in a block to what its code stands for.

A block has `L` tokens of `D` channels. Its rows of codes run along the tokens of a channel (`ALONG`) or along the
channels of a token, in bytes as `PlanarLayout` says, in groups of `GROUP`. Blocks are numbered from the start of a
tensor. Tokens and channels are int32 tensors that broadcast against each other: the same code reads tiles and single
entries.
"""

import triton
import triton.language as tl


@triton.jit
def planar_codes(ptr, row, place, live, NBITS: tl.constexpr, LENGTH: tl.constexpr):
    """Codes, int32, at places of rows of `LENGTH` codes; zeros where not `live`."""
    FILLED: tl.constexpr = (LENGTH + 7) // 8 * 8
    ROW: tl.constexpr = FILLED * NBITS // 8
    if NBITS == 8:
        return tl.load(ptr + row * ROW + place, mask=live, other=0).to(tl.int32)
    else:
        UNIT: tl.constexpr = 32 if FILLED % 32 == 0 else 16 if FILLED % 16 == 0 else 8
        WIDTH: tl.constexpr = 2 if NBITS == 3 else NBITS
        PLANE: tl.constexpr = UNIT * WIDTH // 8
        at = place % UNIT
        first = ptr + row * ROW + place // UNIT * (UNIT * NBITS // 8)
        found = tl.load(first + at % PLANE, mask=live, other=0).to(tl.int32)
        codes = (found >> (at // PLANE * WIDTH)) & ((1 << WIDTH) - 1)
        if NBITS == 3:
            TOP: tl.constexpr = UNIT // 8
            found = tl.load(first + PLANE + at % TOP, mask=live, other=0).to(tl.int32)
            codes = codes | (((found >> (at // TOP)) & 1) << 2)
        return codes


@triton.jit
def with_low_bits(codes, extra, promoted, block, token, channel, live, L: tl.constexpr, PROMOTED: tl.constexpr):
    """Codes `[N, C]` of rows along tokens, those of promoted channels with their low bits.

    Tokens are `[N, 1]`, channels `[1, C]`.
    """
    PADDED: tl.constexpr = triton.next_power_of_2(PROMOTED)
    index = tl.arange(0, PADDED)
    number = tl.load(promoted + block * PROMOTED + index, mask=index < PROMOTED, other=0).to(tl.int32)
    same = (tl.trans(channel) == number[None, :]) & (index < PROMOTED)[None, :]
    is_promoted = tl.max(same.to(tl.int32), 1)[None, :] > 0
    row = block * PROMOTED + tl.max(tl.where(same, index[None, :], 0), 1)[None, :]
    low = planar_codes(extra, row, token, live & is_promoted, 2, L)
    return tl.where(is_promoted, codes * 4 + low, codes)


@triton.jit
def decoded(
    codes,
    scale,
    zero_point,
    levels,
    scale_levels,
    base,
    factor,
    extra,
    promoted,
    block,
    token,
    channel,
    live,
    D: tl.constexpr,
    L: tl.constexpr,
    NBITS: tl.constexpr,
    GROUP: tl.constexpr,
    ALONG: tl.constexpr,
    KIND: tl.constexpr,
    MIDDLE: tl.constexpr,
    ZERO_POINT: tl.constexpr,
    FACTOR: tl.constexpr,
    PROMOTED: tl.constexpr,
):
    """What codes stand for, float32, in the basis that they are stored in; zero where not `live`.

    Args:
        codes: Uint8 `[..., rows, bytes]`, like all tensors here contiguous from the first block on.
        scale: `[..., rows, groups]`, float16, float32 or, relative to `base`, uint8.
        zero_point: Likewise, of use with `ZERO_POINT`.
        levels: What codes stand for before scale and zero point, float32, for `KIND` `table`.
        scale_levels: What bytes of scales stand for, float32; 256 places on if `base` is negative.
        base: One number a block.
        factor: One number of each place in a row, with `FACTOR`.
        extra: Low bits of promoted channels, uint8 `[..., PROMOTED, bytes]`.
        promoted: Their numbers, uint8 `[..., PROMOTED]`.
        block: Number of the block, int64.
        token: Tokens of the block.
        channel: Channels.
        live: Where there is something to read.
        D: Channels.
        L: Tokens of a block.
        NBITS: Bits per code, 2 to 8; those of the high part where channels are promoted.
        GROUP: Codes that share a scale.
        ALONG: Whether rows belong to channels.
        KIND: `even`; `table`; `hybrid`: a group has a zero point if the sign of its scale is set; `centered`:
            even, with zero points (none of `ZERO_POINT`) that are added after the factor.
        MIDDLE: The even level that stands for zero without a zero point.
        ZERO_POINT: Whether there are zero points.
        FACTOR: Whether places have factors.
        PROMOTED: Promoted channels of a block.
    """
    LENGTH: tl.constexpr = L if ALONG else D
    GROUPS: tl.constexpr = (LENGTH + GROUP - 1) // GROUP
    if ALONG:
        row = block * D + channel
        place = token
    else:
        row = block * L + token
        place = channel
    found = planar_codes(codes, row, place, live, NBITS, LENGTH)
    if PROMOTED:
        found = with_low_bits(found, extra, promoted, block, token, channel, live, L, PROMOTED)
    number = tl.load(levels + found, mask=live, other=0.0) if KIND == "table" else found.to(tl.float32)
    group = row * GROUPS + place // GROUP
    step = tl.load(scale + group, mask=live, other=0)
    if scale.dtype.element_ty == tl.uint8:
        share = tl.load(base + block).to(tl.float32)
        byte = step.to(tl.int32) + tl.where(share < 0, 256, 0)
        step = tl.load(scale_levels + byte, mask=live, other=0.0) * tl.abs(share)
    step = step.to(tl.float32)
    if ZERO_POINT:
        offset = tl.load(zero_point + group, mask=live, other=0.0).to(tl.float32)
        shifted = number * tl.abs(step) + offset
        if KIND == "hybrid":
            is_shifted = step.to(tl.int32, bitcast=True) < 0  # also where the scale is -0.0
            number = tl.where(is_shifted, shifted, (number - MIDDLE) * step)
        else:
            number = shifted
    else:
        number = (number - MIDDLE) * step
    if FACTOR:
        number = number * tl.load(factor + block * LENGTH + place, mask=live, other=0.0).to(tl.float32)
    if KIND == "centered":
        number += tl.load(zero_point + group, mask=live, other=0.0).to(tl.float32)
    return tl.where(live, number, 0.0)
