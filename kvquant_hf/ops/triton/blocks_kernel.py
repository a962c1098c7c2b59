"""Reading packed keys and values: tiles of words to tiles of float16, on the way into a matrix product.

Sizes: `D` channels of a head, `DW` words of a row, `DWP` the same rounded up to what a tile needs, `BN` tokens of a
tile, `GROUP` elements that share parameters. A tile of words `[BN, DWP]` has `16 / width` planes; columns of the
unpacked tile are ordered (word, plane, half), see `place_of_column`. Groups and layouts are those of `WordLayout`.
"""

import triton
import triton.language as tl

from kvquant_hf.ops.triton.half2 import doubled_high, doubled_low, fma2, fms2, halves, mul2, planes


@triton.jit
def place_of_column(column, PLANES: tl.constexpr, DW: tl.constexpr):
    """`(place, is_real)` of columns of a tile of `PLANES` planes, places counted from the first plane's."""
    word = column // (2 * PLANES)
    return 2 * ((column // 2) % PLANES * DW + word) + column % 2, word < DW


@triton.jit
def channel_of_place(place, D: tl.constexpr, ROTARY: tl.constexpr, OFFSET: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The channel at a place, as `ChannelOrder` says."""
    half = place // (D // 2)
    angle = place % (D // 2)
    if INTERLEAVED:
        rotated = OFFSET + 2 * angle + half
    else:
        rotated = OFFSET + half * (ROTARY // 2) + angle
    passed = half * ((D - ROTARY) // 2) + angle - ROTARY // 2
    passed = tl.where(passed < OFFSET, passed, passed + ROTARY)
    return tl.where(angle < ROTARY // 2, rotated, passed)


@triton.jit
def load_words(ptr, token, num_tokens, NBITS: tl.constexpr, DW: tl.constexpr, DWP: tl.constexpr, ROW: tl.constexpr):
    """Words `[BN, DWP]` of tokens, and the words that hold the top bits of 3-bit codes."""
    word = tl.arange(0, DWP)
    live = token[:, None] < num_tokens
    if DWP != DW:
        live = live & (word[None, :] < DW)
    rows = ptr + token[:, None] * ROW
    words = tl.load(rows + word[None, :], mask=live, other=0)
    if NBITS == 3:
        TOPS: tl.constexpr = ROW - DW
        tops = tl.load(rows + DW + (word % TOPS)[None, :], mask=live, other=0)
        return words, tops >> (word // TOPS)[None, :]
    else:
        return words, words


@triton.jit
def spread(found, BN: tl.constexpr, DWP: tl.constexpr, PLANES: tl.constexpr, GROUPS: tl.constexpr):
    """Parameters of groups `[GROUPS, DWP, PLANES]` to each of the tile's tokens, `[BN, DWP, PLANES]`."""
    wide = tl.broadcast_to(found[:, None, :, :], [GROUPS, BN // GROUPS, DWP, PLANES])
    return tl.reshape(wide, [BN, DWP, PLANES])


@triton.jit
def key_parameters(
    ptr,
    first_token,
    num_tokens,
    D: tl.constexpr,
    DW: tl.constexpr,
    DWP: tl.constexpr,
    PLANES: tl.constexpr,
    BN: tl.constexpr,
    GROUP: tl.constexpr,
    SYMMETRIC: tl.constexpr,
):
    """Scales and zero points of a tile of keys, pairs `[BN, DWP, PLANES]` each."""
    GROUPS: tl.constexpr = BN // GROUP if GROUP < BN else 1
    ROW: tl.constexpr = D // 2 if SYMMETRIC else D
    group = first_token // GROUP + tl.arange(0, GROUPS)
    if DWP == DW:
        # One wide load; its pieces are told apart in registers.
        word = tl.arange(0, ROW)
        found = tl.load(ptr + group[:, None] * ROW + word[None, :], mask=group[:, None] * GROUP < num_tokens, other=0)
        if SYMMETRIC:
            scale = tl.permute(tl.reshape(found, [GROUPS, PLANES, DW]), [0, 2, 1])
            zero = scale
        else:
            found = tl.permute(tl.reshape(found, [GROUPS, 2, PLANES, DW]), [0, 3, 2, 1])
            scale, zero = tl.split(found)
    else:
        word = tl.arange(0, DWP)[None, :, None]
        column = tl.arange(0, PLANES)[None, None, :] * DW + word
        live = (group[:, None, None] * GROUP < num_tokens) & (word < DW)
        scale = tl.load(ptr + group[:, None, None] * ROW + column, mask=live, other=0)
        if SYMMETRIC:
            zero = scale
        else:
            zero = tl.load(ptr + group[:, None, None] * ROW + D // 2 + column, mask=live, other=0)
    return spread(scale, BN, DWP, PLANES, GROUPS), spread(zero, BN, DWP, PLANES, GROUPS)


@triton.jit
def load_keys(
    codes,
    metadata,
    cosines,
    sines,
    first_token,
    num_tokens,
    D: tl.constexpr,
    NBITS: tl.constexpr,
    GROUP: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    DW: tl.constexpr,
    DWP: tl.constexpr,
    ROW: tl.constexpr,
    BN: tl.constexpr,
    ROTARY: tl.constexpr,
    ASM: tl.constexpr,
):
    """Both halves of a tile of keys, float16 `[BN, DWP · planes]` each, turned by their offset in the tile."""
    COUNT: tl.constexpr = 16 // (2 if NBITS == 3 else NBITS)
    words, tops = load_words(codes, first_token + tl.arange(0, BN), num_tokens, NBITS, DW, DWP, ROW)
    scale, zero = key_parameters(metadata, first_token, num_tokens, D, DW, DWP, COUNT, BN, GROUP, SYMMETRIC)
    x = planes(words, tops, 0, COUNT, 1, NBITS, SYMMETRIC, ASM)
    x = mul2(x, scale, ASM) if SYMMETRIC else fma2(x, scale, zero, ASM)
    first, second = tl.split(tl.permute(tl.reshape(x, [BN, DWP, 2, COUNT // 2]), [0, 1, 3, 2]))
    if ROTARY:
        turned = fms2(first, cosines, second, sines, ASM)
        second = fma2(second, cosines, mul2(first, sines, ASM), ASM)
        first = turned
    first = tl.reshape(first, [BN, DWP * COUNT // 2])
    second = tl.reshape(second, [BN, DWP * COUNT // 2])
    return halves(first, ASM), halves(second, ASM)


@triton.jit
def scales_of_bytes(found, base, NBITS: tl.constexpr):
    """Scales that bytes stand for, float16, over `|base| · 2**(NBITS - 16)`.

    So codes times scales end below 32768, and the smallest are as far above the end of float16 as they can be.
    """
    steps = tl.where(base < 0, 1 / 8, 1 / 32)
    scale = tl.exp2((found.to(tl.float32) - 255) * steps + (16 - NBITS))
    return tl.where(found == 0, 0.0, scale).to(tl.float16)


@triton.jit
def load_values(
    codes,
    metadata,
    base,
    first_token,
    num_tokens,
    D: tl.constexpr,
    NBITS: tl.constexpr,
    GROUP: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    DW: tl.constexpr,
    DWP: tl.constexpr,
    ROW: tl.constexpr,
    BN: tl.constexpr,
    BYTES: tl.constexpr,
    ASM: tl.constexpr,
):
    """A tile of values, float16 `[BN, 2 · DWP · planes]`; zeros beyond the last token.

    With `BYTES` scales are bytes relative to `base`, and the values over `|base| · 2**(NBITS - 16)`.
    """
    COUNT: tl.constexpr = 16 // (2 if NBITS == 3 else NBITS)
    NG: tl.constexpr = (D + GROUP - 1) // GROUP
    token = first_token + tl.arange(0, BN)
    words, tops = load_words(codes, token, num_tokens, NBITS, DW, DWP, ROW)
    live = token < num_tokens
    # Parameters are loaded once per group where groups and planes fit each other, else once per word and plane.
    if DWP == DW:
        found = tl.load(metadata + token[:, None] * NG + tl.arange(0, NG)[None, :], mask=live[:, None], other=0)
        if BYTES:
            found = scales_of_bytes(found, base, NBITS)
        if GROUP >= D:
            found = tl.reshape(found, [BN, 1, 1])
        elif GROUP % (2 * DW) == 0:
            PER_GROUP: tl.constexpr = GROUP // (2 * DW)
            found = tl.broadcast_to(found[:, :, None], [BN, NG, PER_GROUP])
            found = tl.reshape(found, [BN, 1, COUNT])
        else:
            PER_PLANE: tl.constexpr = 2 * DW // GROUP
            found = tl.permute(tl.reshape(found, [BN, COUNT, PER_PLANE]), [0, 2, 1])
            found = tl.broadcast_to(found[:, :, None, :], [BN, PER_PLANE, GROUP // 2, COUNT])
            found = tl.reshape(found, [BN, DW, COUNT])
    else:
        word = tl.arange(0, DWP)[None, :, None]
        group = 2 * (tl.arange(0, COUNT)[None, None, :] * DW + word) // GROUP
        found = tl.load(metadata + token[:, None, None] * NG + group, mask=live[:, None, None] & (word < DW), other=0)
        if BYTES:
            found = scales_of_bytes(found, base, NBITS)
    x = planes(words, tops, 0, COUNT, 1, NBITS, SYMMETRIC, ASM)
    if SYMMETRIC:
        x = mul2(x, doubled_low(found.to(tl.int16, bitcast=True).to(tl.int32), ASM), ASM)
    else:
        x = fma2(x, doubled_low(found, ASM), doubled_high(found, ASM), ASM)
    return halves(tl.reshape(x, [BN, DWP * COUNT]), ASM)
