"""Tiles and outliers of blocks in the common layout, put together from single numbers.

Arguments as `planar_codes_kernel.decoded` describes them.
"""

import triton
import triton.language as tl

from kvquant_hf.ops.triton.planar_codes_kernel import decoded
from kvquant_hf.ops.triton.promoted_kernel import place_of_channel


@triton.jit
def hadamard_sign(row, column):
    """Sign of an entry of a Hadamard matrix of up to four rows."""
    both = row & column
    return 1.0 - 2.0 * ((both ^ (both >> 1)) & 1).to(tl.float32)


@triton.jit
def mixed(
    codes,
    scale,
    zero_point,
    levels,
    scale_levels,
    base,
    factor,
    extra,
    promoted,
    first_head,
    head,
    capacity,
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
    HEADS: tl.constexpr,
):
    """A tile of a head, where `HEADS` neighbouring heads are stored mixed by a Hadamard matrix.

    `first_head` is the number of the first head of the batch row, int64; `capacity` the blocks that a head has room
    for. With one head the tile is that head's own.
    """
    group = first_head + head // HEADS * HEADS
    tile = decoded(
        codes,
        scale,
        zero_point,
        levels,
        scale_levels,
        base,
        factor,
        extra,
        promoted,
        group * capacity + block,
        token,
        channel,
        live,
        D,
        L,
        NBITS,
        GROUP,
        ALONG,
        KIND,
        MIDDLE,
        ZERO_POINT,
        FACTOR,
        PROMOTED,
    )
    for other in tl.static_range(1, HEADS):
        tile += hadamard_sign(head % HEADS, other) * decoded(
            codes,
            scale,
            zero_point,
            levels,
            scale_levels,
            base,
            factor,
            extra,
            promoted,
            (group + other) * capacity + block,
            token,
            channel,
            live,
            D,
            L,
            NBITS,
            GROUP,
            ALONG,
            KIND,
            MIDDLE,
            ZERO_POINT,
            FACTOR,
            PROMOTED,
        )
    return tile * HEADS**-0.5 if HEADS > 1 else tile


@triton.jit
def outlier_offsets(
    codes,
    scale,
    zero_point,
    levels,
    scale_levels,
    base,
    factor,
    extra,
    promoted,
    places,
    exact,
    block,
    start,
    first_token,
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
    COUNT: tl.constexpr,
    BO: tl.constexpr,
    BN: tl.constexpr,
):
    """`BO` of the `COUNT` outliers of a block, from `start` on, as far as they belong to a tile.

    Args, besides those of `decoded`:
        places: Where they lie in the block, row by row, int16 (to be read without sign) or int32.
        exact: What they are.
        start: The first of them.
        first_token: First token of the tile, which has `BN`.

    Returns:
        Which of them are in the tile, tokens in the block, channels, and how far codes are off (0 outside the tile).
    """
    index = start + tl.arange(0, BO)
    there = index < COUNT
    place = tl.load(places + block * COUNT + index, mask=there, other=0).to(tl.int32)
    if places.dtype.element_ty == tl.int16:
        place = place & 0xFFFF
    number = tl.load(exact + block * COUNT + index, mask=there, other=0.0).to(tl.float32)
    token = place % L if ALONG else place // D
    channel = place // L if ALONG else place % D
    there = there & (token >= first_token) & (token < first_token + BN)
    found = decoded(
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
        there,
        D,
        L,
        NBITS,
        GROUP,
        ALONG,
        KIND,
        MIDDLE,
        ZERO_POINT,
        FACTOR,
        PROMOTED,
    )
    return there, token, channel, tl.where(there, number - found, 0.0)


@triton.jit
def angles_of(table, row, angle, live, ROTARY: tl.constexpr):
    """Cosines and sines, 1 and 0 where not `live`."""
    entry = table + row * ROTARY + angle
    cosine = tl.load(entry, mask=live, other=1.0)
    return cosine, tl.load(entry + ROTARY // 2, mask=live, other=0.0)


@triton.jit
def turned(first, second, start_cosine, start_sine, cosine, sine):
    """Pairs rotated by the sum of two angles."""
    total_cosine = start_cosine * cosine - start_sine * sine
    total_sine = start_sine * cosine + start_cosine * sine
    return first * total_cosine - second * total_sine, second * total_cosine + first * total_sine


@triton.jit
def outlier_queries(
    query_rows,
    row_live,
    start_angles,
    offset_angles,
    block,
    there,
    token,
    channel,
    D: tl.constexpr,
    ROTARY: tl.constexpr,
    OFFSET: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """What the scores of tokens gain by a channel of a stored key: queries turned back by the tokens' positions.

    Tokens of a block and channels are `[BO]`, the result `[BO, GP]`, float32.
    """
    live = there[:, None] & row_live[None, :]
    straight = tl.load(query_rows[None, :] + channel[:, None], mask=live, other=0.0).to(tl.float32)
    if ROTARY:
        _, angle, half, rotated = place_of_channel(channel, D, ROTARY, OFFSET, INTERLEAVED)
        rotated = rotated & there
        sign = 1 - 2 * half
        partner = channel + (1 if INTERLEAVED else ROTARY // 2) * sign
        across = tl.load(query_rows[None, :] + partner[:, None], mask=live & rotated[:, None], other=0.0)
        across = across.to(tl.float32) * sign.to(tl.float32)[:, None]
        start_cosine, start_sine = angles_of(start_angles, block, angle, rotated, ROTARY)
        cosine, sine = angles_of(offset_angles, token, angle, rotated, ROTARY)
        straight, _ = turned(
            straight, -across, start_cosine[:, None], start_sine[:, None], cosine[:, None], sine[:, None]
        )
    return straight
