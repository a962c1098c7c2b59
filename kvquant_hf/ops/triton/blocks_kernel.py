"""Reading packed keys and values: tiles of words to tiles of float16, on the way into a matrix product.

Sizes: `D` channels of a head, `DW` words of a row, `DWP` the same rounded up to what a tile needs, `BN` tokens of a
tile, `GROUP` elements that share parameters. A tile of words `[BN, DWP]` has `16 / width` planes; columns of the
unpacked tile are ordered (word, plane, half), see `place_of_column`. Groups and layouts are those of `WordLayout`.
"""

import triton
import triton.language as tl

from kvquant_hf.ops.triton.half2 import doubled_high, doubled_low, fma2, fms2, halves, minus, mul2, planes


@triton.jit
def place_of_column(column, PLANES: tl.constexpr, DW: tl.constexpr):
    """`(place, is_real)` of columns of a tile of `PLANES` planes, places counted from the first plane's."""
    word = column // (2 * PLANES)
    return 2 * ((column // 2) % PLANES * DW + word) + column % 2, word < DW


@triton.jit
def channel_of_place(
    place, D: tl.constexpr, ROTARY: tl.constexpr, OFFSET: tl.constexpr, INTERLEAVED: tl.constexpr
):
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
def load_words(
    ptr, token, num_tokens, NBITS: tl.constexpr, DW: tl.constexpr, DWP: tl.constexpr, ROW: tl.constexpr
):
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
def dequantize(
    x, scale, zero_point, NBITS: tl.constexpr, SYMMETRIC: tl.constexpr, ASM: tl.constexpr
):
    """Pairs of values of pairs `2**NBITS + code`: exact code, then one multiply-add in float16."""
    ONE: tl.constexpr = (15 + NBITS) * 1024
    if SYMMETRIC:
        # 2**NBITS and the code that stands for zero go in one subtraction.
        return mul2(minus(x, 1.5 * 2**NBITS, ONE + 512, ASM), scale, ASM)
    else:
        return fma2(minus(x, 1.0 * 2**NBITS, ONE, ASM), scale, zero_point, ASM)


@triton.jit
def key_parameters(
    ptr,
    first_token,
    num_tokens,
    FIRST: tl.constexpr,
    COUNT: tl.constexpr,
    PART: tl.constexpr,
    D: tl.constexpr,
    DW: tl.constexpr,
    DWP: tl.constexpr,
    BN: tl.constexpr,
    GROUP: tl.constexpr,
    SYMMETRIC: tl.constexpr,
):
    """Scales (`PART` 0) or zero points (1) of `COUNT` planes of keys, pairs `[BN, DWP, COUNT]`."""
    SPAN: tl.constexpr = GROUP if GROUP < BN else BN
    ROW: tl.constexpr = D // 2 if SYMMETRIC else D
    group = first_token // GROUP + tl.arange(0, BN // SPAN)
    word = tl.arange(0, DWP)
    column = PART * (D // 2) + (FIRST + tl.arange(0, COUNT))[None, :] * DW + word[:, None]
    live = (group[:, None, None] * GROUP < num_tokens) & (word[None, :, None] < DW)
    found = tl.load(ptr + group[:, None, None] * ROW + column[None, :, :], mask=live, other=0)
    return tl.reshape(
        tl.broadcast_to(found[:, None, :, :], [BN // SPAN, SPAN, DWP, COUNT]), [BN, DWP, COUNT]
    )


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
    COUNT: tl.constexpr = 8 // (2 if NBITS == 3 else NBITS)
    words, tops = load_words(codes, first_token + tl.arange(0, BN), num_tokens, NBITS, DW, DWP, ROW)
    first = planes(words, tops, 0, COUNT, 1, NBITS, ASM)
    second = planes(words, tops, COUNT, COUNT, 1, NBITS, ASM)
    scale = key_parameters(metadata, first_token, num_tokens, 0, COUNT, 0, D, DW, DWP, BN, GROUP, SYMMETRIC)
    scale2 = key_parameters(metadata, first_token, num_tokens, COUNT, COUNT, 0, D, DW, DWP, BN, GROUP, SYMMETRIC)
    if SYMMETRIC:
        first = dequantize(first, scale, scale, NBITS, SYMMETRIC, ASM)
        second = dequantize(second, scale2, scale2, NBITS, SYMMETRIC, ASM)
    else:
        zero = key_parameters(metadata, first_token, num_tokens, 0, COUNT, 1, D, DW, DWP, BN, GROUP, SYMMETRIC)
        zero2 = key_parameters(metadata, first_token, num_tokens, COUNT, COUNT, 1, D, DW, DWP, BN, GROUP, SYMMETRIC)
        first = dequantize(first, scale, zero, NBITS, SYMMETRIC, ASM)
        second = dequantize(second, scale2, zero2, NBITS, SYMMETRIC, ASM)
    if ROTARY:
        turned = fms2(first, cosines, second, sines, ASM)
        second = fma2(second, cosines, mul2(first, sines, ASM), ASM)
        first = turned
    first = tl.reshape(first, [BN, DWP * COUNT])
    second = tl.reshape(second, [BN, DWP * COUNT])
    return halves(first), halves(second)


@triton.jit
def load_values(
    codes,
    metadata,
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
    ASM: tl.constexpr,
):
    """A tile of values, float16 `[BN, 2 · DWP · planes]`; zeros beyond the last token."""
    COUNT: tl.constexpr = 16 // (2 if NBITS == 3 else NBITS)
    NG: tl.constexpr = (D + GROUP - 1) // GROUP
    token = first_token + tl.arange(0, BN)
    words, tops = load_words(codes, token, num_tokens, NBITS, DW, DWP, ROW)
    rows = metadata + token[:, None, None] * NG
    live = token[:, None, None] < num_tokens
    plane = tl.arange(0, COUNT)[None, None, :]
    # Parameters are loaded once per group where groups and planes fit each other, else once per word and plane.
    if NG == 1:
        found = tl.load(rows, mask=live, other=0)
    elif DWP == DW and GROUP % (2 * DW) == 0:
        PER_GROUP: tl.constexpr = GROUP // (2 * DW)
        group = tl.arange(0, COUNT // PER_GROUP)[None, None, :]
        found = tl.load(rows + group, mask=live, other=0)
        found = tl.broadcast_to(found[:, :, :, None], [BN, 1, COUNT // PER_GROUP, PER_GROUP])
        found = tl.reshape(found, [BN, 1, COUNT])
    elif DWP == DW and 2 * DW % GROUP == 0:
        PER_PLANE: tl.constexpr = 2 * DW // GROUP
        group = plane * PER_PLANE + tl.arange(0, PER_PLANE)[None, :, None]
        found = tl.load(rows + group, mask=live, other=0)
        found = tl.broadcast_to(found[:, :, None, :], [BN, PER_PLANE, GROUP // 2, COUNT])
        found = tl.reshape(found, [BN, DW, COUNT])
    else:
        word = tl.arange(0, DWP)[None, :, None]
        group = 2 * (plane * DW + word) // GROUP
        found = tl.load(rows + group, mask=live & (word < DW), other=0)
    x = planes(words, tops, 0, COUNT, 1, NBITS, ASM)
    if SYMMETRIC:
        scale = doubled_low(found.to(tl.int16, bitcast=True).to(tl.int32), ASM)
        x = dequantize(x, scale, scale, NBITS, SYMMETRIC, ASM)
    else:
        x = dequantize(x, doubled_low(found, ASM), doubled_high(found, ASM), NBITS, SYMMETRIC, ASM)
    return halves(tl.reshape(x, [BN, DWP * COUNT]))
