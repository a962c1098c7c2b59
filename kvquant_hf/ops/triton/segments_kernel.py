"""Packed tokens, which a program of the decode kernel goes through tile by tile.

Matrix products have tokens, then channels, on the wide side: `Sᵀ[BN, GP] = K qᵀ` and `Oᵀ[D, GP] = Vᵀ Pᵀ`, since a
decode step has few query rows and the wide side of a tensor core instruction is at least 16, of a warp group 64.
Sizes as in `decode_kernel.py`.
"""

import triton
import triton.language as tl

from kvquant_hf.ops.triton.blocks_kernel import channel_of_place, load_keys, load_values, place_of_column
from kvquant_hf.ops.triton.exact_kernel import FLOOR, masked_scores, softmax_step
from kvquant_hf.ops.triton.promoted_kernel import add_promoted


@triton.jit
def packed_segment(
    query_rows,
    row_live,
    key_codes,
    key_metadata,
    value_codes,
    value_metadata,
    key_factor,
    value_factor,
    key_extra,
    key_promoted,
    start_table,
    offset_table,
    start_angles,
    offset_angles,
    first_token,
    last_token,
    first_slot,
    hidden_from,
    hidden_to,
    mask_rows,
    mask_row_live,
    scale,
    MASK: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    KEY_BITS: tl.constexpr,
    KEY_GROUP: tl.constexpr,
    KEY_SYMMETRIC: tl.constexpr,
    KW: tl.constexpr,
    KWP: tl.constexpr,
    KROW: tl.constexpr,
    ROTARY: tl.constexpr,
    OFFSET: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    DV: tl.constexpr,
    DVP: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    VALUE_GROUP: tl.constexpr,
    VALUE_SYMMETRIC: tl.constexpr,
    VW: tl.constexpr,
    VWP: tl.constexpr,
    VROW: tl.constexpr,
    KEY_FACTOR: tl.constexpr,
    VALUE_FACTOR: tl.constexpr,
    VALUE_BYTES: tl.constexpr,
    PROMOTED: tl.constexpr,
    PP: tl.constexpr,
    L: tl.constexpr,
    GP: tl.constexpr,
    BN: tl.constexpr,
    STAGES: tl.constexpr,
    PADDED: tl.constexpr,
    ASM: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Tokens `first_token … last_token - 1` of the blocks; slots `hidden_from … hidden_to - 1` are left out.

    A tile lies within one block of `L` tokens where values have factors or scales of a byte, whose factor or base
    multiplies its sum as a whole, and where channels are promoted, which are others in every block.
    """
    peak = tl.full([GP], FLOOR, tl.float32)
    total = tl.zeros([GP], tl.float32)
    acc = tl.zeros([DVP, GP], tl.float32)
    if KEY_BITS < 16:
        PLANES: tl.constexpr = 8 // (2 if KEY_BITS == 3 else KEY_BITS)
        COLUMNS: tl.constexpr = 2 * KWP * PLANES
        column = tl.arange(0, COLUMNS)
        place, real = place_of_column(column, PLANES, KW)
        real = row_live[:, None] & real[None, :]
        channel = channel_of_place(place, D, ROTARY, OFFSET, INTERLEAVED)
        channel2 = channel_of_place(place + D // 2, D, ROTARY, OFFSET, INTERLEAVED)
        q = tl.load(query_rows[:, None] + channel[None, :], mask=real, other=0.0).to(tl.float32) * scale
        q2 = tl.load(query_rows[:, None] + channel2[None, :], mask=real, other=0.0).to(tl.float32) * scale
        half_q = q.to(tl.float16)
        half_q2 = q2.to(tl.float16)
        if ROTARY:
            # Cosines and sines of the offsets in a tile, pairs of float16, the same for every tile.
            entry = tl.arange(0, BN)[:, None] * COLUMNS + tl.arange(0, KWP * PLANES)[None, :]
            cosines = tl.reshape(tl.load(offset_table + entry), [BN, KWP, PLANES])
            sines = tl.reshape(tl.load(offset_table + KWP * PLANES + entry), [BN, KWP, PLANES])
        else:
            cosines = 0
            sines = 0
    else:
        column = tl.arange(0, DP)
        q = (
            tl.load(
                query_rows[:, None] + column[None, :], mask=row_live[:, None] & (column[None, :] < D), other=0.0
            ).to(tl.float32)
            * scale
        )
    if VALUE_FACTOR:
        value_place, value_real = place_of_column(tl.arange(0, DVP), 16 // (2 if VALUE_BITS == 3 else VALUE_BITS), VW)
    for start in tl.range(first_token, last_token, BN, num_stages=STAGES):
        token = start + tl.arange(0, BN)
        if KEY_BITS < 16:
            k, k2 = load_keys(
                key_codes,
                key_metadata,
                cosines,
                sines,
                start,
                last_token,
                D,
                KEY_BITS,
                KEY_GROUP,
                KEY_SYMMETRIC,
                KW,
                KWP,
                KROW,
                BN,
                ROTARY,
                ASM,
            )
            if ROTARY:
                # q·R(a+b)k = (R(-a)q)·(R(b)k): the query is turned back by the start of the tile.
                angles = start_table + (start // BN) * (2 * COLUMNS)
                cosine = tl.load(angles + column)[None, :]
                sine = tl.load(angles + COLUMNS + column)[None, :]
                half_q = (q * cosine + q2 * sine).to(tl.float16)
                half_q2 = (q2 * cosine - q * sine).to(tl.float16)
            scores = tl.dot(k, tl.trans(half_q))
            scores = tl.dot(k2, tl.trans(half_q2), acc=scores)
            if PROMOTED:
                scores = add_promoted(
                    scores,
                    query_rows,
                    row_live,
                    key_metadata,
                    key_extra,
                    key_promoted,
                    start_angles,
                    offset_angles,
                    start,
                    scale,
                    D,
                    KEY_GROUP,
                    ROTARY,
                    OFFSET,
                    INTERLEAVED,
                    PROMOTED,
                    PP,
                    L,
                    BN,
                    ASM,
                )
        else:
            k = tl.load(
                key_codes + token[:, None] * D + column[None, :],
                mask=(token[:, None] < last_token) & (column[None, :] < D),
                other=0.0,
            )
            scores = tl.dot(k.to(tl.float32), tl.trans(q), input_precision=PRECISION)
        if KEY_FACTOR:
            factor = tl.load(key_factor + token, mask=token < last_token, other=0.0)
            scores = scores * factor.to(tl.float32)[:, None]
        slot = first_slot + token
        live = token < last_token
        if PADDED:
            live = live & ((slot < hidden_from) | (slot >= hidden_to))
        scores = masked_scores(scores, slot, live[:, None], mask_rows, mask_row_live, MASK)
        weights, peak, total, decay = softmax_step(scores, peak, total)
        if VALUE_BITS < 16:
            base = 0.0
            if VALUE_BYTES:
                base = tl.load(value_factor + start // L).to(tl.float32)
            v = load_values(
                value_codes,
                value_metadata,
                base,
                start,
                last_token,
                DV,
                VALUE_BITS,
                VALUE_GROUP,
                VALUE_SYMMETRIC,
                VW,
                VWP,
                VROW,
                BN,
                VALUE_BYTES,
                ASM,
            )
            if VALUE_FACTOR:
                factor = tl.load(value_factor + start // L * DV + value_place, mask=value_real, other=0.0)
                part = tl.dot(tl.trans(v), weights.to(tl.float16))
                acc = acc * decay[None, :] + part * factor.to(tl.float32)[:, None]
            elif VALUE_BYTES:
                # Any base will do: float32 takes it, float16 only what the bytes say.
                part = tl.dot(tl.trans(v), weights.to(tl.float16))
                acc = acc * decay[None, :] + part * (tl.abs(base) * 2.0 ** (VALUE_BITS - 16))
            else:
                acc = tl.dot(tl.trans(v), weights.to(tl.float16), acc=acc * decay[None, :])
        else:
            value_column = tl.arange(0, DVP)
            v = tl.load(
                value_codes + token[:, None] * DV + value_column[None, :],
                mask=(token[:, None] < last_token) & (value_column[None, :] < DV),
                other=0.0,
            )
            acc = tl.dot(tl.trans(v.to(tl.float32)), weights, acc=acc * decay[None, :], input_precision=PRECISION)
    return peak, total, acc
