"""What promoted channels of keys add to the scores of a tile: the part of their low bits.

The words of a tile hold the high bits of all channels, `blocks_kernel.py` reads them. A promoted channel `c` with the
low part `v = s · low` of a token at position `a + b` (start of the tile, offset in it) adds

    v · (cos b · (q_c cos a + r sin a) + sin b · (r cos a - q_c sin a))

where `r` is the query at the channel that RoPE pairs `c` with, its sign turned if `c` is the second of the two. Both
terms are products of a matrix over tokens and one over query rows. Channels need not come in pairs here: those that
are not rotated have no partner.

Sizes as in `blocks_kernel.py`; `PROMOTED` channels of a block, `PP` the same rounded up to what a product needs.
"""

import triton
import triton.language as tl

from kvquant_hf.ops.triton.half2 import doubled_low, halves, mul2, planes


@triton.jit
def place_of_channel(channel, D: tl.constexpr, ROTARY: tl.constexpr, OFFSET: tl.constexpr, INTERLEAVED: tl.constexpr):
    """`(place, angle, is second of a pair, is rotated)` of channels; the inverse of `channel_of_place`."""
    window = channel - OFFSET
    if INTERLEAVED:
        half = window % 2
        angle = window // 2
    else:
        half = (window >= ROTARY // 2).to(tl.int32)
        angle = window - half * (ROTARY // 2)
    place = half * (D // 2) + angle
    # Masks that are known to be true cost nothing.
    rotated = tl.full(channel.shape, True, tl.int1)
    if ROTARY < D:
        rotated = (window >= 0) & (window < ROTARY)
        passed = tl.where(channel < OFFSET, channel, channel - ROTARY)
        passed_half = (passed >= (D - ROTARY) // 2).to(tl.int32)
        passed_place = passed - passed_half * ((D - ROTARY) // 2) + passed_half * (D // 2) + ROTARY // 2
        place = tl.where(rotated, place, passed_place)
        angle = tl.where(rotated, angle, 0)
    return place, angle, half, rotated


@triton.jit
def load_low_parts(
    metadata,
    extra,
    place,
    there,
    first_token,
    D: tl.constexpr,
    GROUP: tl.constexpr,
    PROMOTED: tl.constexpr,
    PP: tl.constexpr,
    L: tl.constexpr,
    BN: tl.constexpr,
    ASM: tl.constexpr,
):
    """`s · low` of a tile, pairs of tokens `[PP, BN / 2]`; `place` `[PP]` says where the scales are."""
    WORDS: tl.constexpr = BN // 16
    GROUPS: tl.constexpr = BN // GROUP if GROUP < BN else 1
    row = first_token // L * PROMOTED + tl.arange(0, PP)
    word = first_token % L // 16 + tl.arange(0, WORDS)
    words = tl.load(extra + row[:, None] * (L // 16) + word[None, :], mask=there[:, None], other=0)
    x = planes(words, words, 0, 8, 1, 2, False, ASM)
    group = first_token // GROUP + tl.arange(0, GROUPS)
    scales = metadata.to(tl.pointer_type(tl.float16), bitcast=True)
    found = tl.load(scales + group[None, :] * (2 * D) + place[:, None], mask=there[:, None], other=0.0)
    # Stored is the scale of the high bits, four times that of the low ones.
    scale = doubled_low((found * 0.25).to(tl.int16, bitcast=True).to(tl.int32), ASM)
    scale = tl.broadcast_to(scale[:, :, None], [PP, GROUPS, WORDS // GROUPS])
    return tl.reshape(mul2(x, tl.reshape(scale, [PP, WORDS, 1]), ASM), [PP, BN // 2])


@triton.jit
def add_promoted(
    scores,
    query_rows,
    row_live,
    metadata,
    extra,
    promoted,
    start_angles,
    offset_angles,
    first_token,
    scale,
    D: tl.constexpr,
    GROUP: tl.constexpr,
    ROTARY: tl.constexpr,
    OFFSET: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PROMOTED: tl.constexpr,
    PP: tl.constexpr,
    L: tl.constexpr,
    BN: tl.constexpr,
    ASM: tl.constexpr,
):
    """Scores `[BN, GP]` of a whole tile, which lies within one block of `L` tokens, with the low parts added."""
    index = tl.arange(0, PP)
    there = index < PROMOTED if PROMOTED < PP else tl.full([PP], True, tl.int1)
    channel = tl.load(promoted + first_token // L * PROMOTED + index, mask=there, other=0).to(tl.int32)
    place, angle, half, rotated = place_of_channel(channel, D, ROTARY, OFFSET, INTERLEAVED)
    low = load_low_parts(metadata, extra, place, there, first_token, D, GROUP, PROMOTED, PP, L, BN, ASM)
    live = there[:, None] & row_live[None, :]
    q = tl.load(query_rows[None, :] + channel[:, None], mask=live, other=0.0).to(tl.float32) * scale
    if ROTARY:
        step = 1 if INTERLEAVED else ROTARY // 2
        sign = 1 - 2 * half
        r = tl.load(
            query_rows[None, :] + (channel + step * sign)[:, None], mask=live & rotated[:, None], other=0.0
        ).to(tl.float32)
        r = r * (sign.to(tl.float32) * scale)[:, None]
        start = start_angles + first_token // BN * ROTARY + angle
        cosine = tl.load(start, mask=rotated, other=1.0)[:, None]
        sine = tl.load(start + ROTARY // 2, mask=rotated, other=0.0)[:, None]
        offset = offset_angles + angle[:, None] * BN + tl.arange(0, BN // 2)[None, :]
        cosines = tl.load(offset, mask=rotated[:, None], other=0x3C003C00)
        sines = tl.load(offset + BN // 2, mask=rotated[:, None], other=0)
        straight = (q * cosine + r * sine).to(tl.float16)
        across = (r * cosine - q * sine).to(tl.float16)
        scores = tl.dot(tl.trans(halves(mul2(low, cosines, ASM), ASM)), straight, acc=scores)
        return tl.dot(tl.trans(halves(mul2(low, sines, ASM), ASM)), across, acc=scores)
    else:
        return tl.dot(tl.trans(halves(low, ASM)), q.to(tl.float16), acc=scores)
