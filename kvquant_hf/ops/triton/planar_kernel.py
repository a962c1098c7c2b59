"""Split-K decode attention over blocks in the common layout: the codes of every method, number by number.

`decode_kernel.py` reads the presets that are made for use, from words of its own. This kernel reads what that one does
not: levels of a table, outliers, keys per token, values per channel, factors of either side, rotations that have to be
undone before RoPE, numbers beyond float16. It computes in float32 (products in TF32) and makes no attempt at speed
beyond reading codes instead of numbers.

Sizes as in `decode_kernel.py`; a tile is `BN` tokens of one block of `L`, a split a range of `chunk` tiles.
"""

import triton
import triton.language as tl

from kvquant_hf.ops.triton.blocks_kernel import channel_of_place
from kvquant_hf.ops.triton.exact_kernel import FLOOR, exact_tokens, masked_scores, softmax_step, store_partial
from kvquant_hf.ops.triton.planar_tiles_kernel import angles_of, mixed, outlier_offsets, outlier_queries, turned


@triton.jit(
    do_not_specialize=[
        "num_tiles",
        "num_sinks",
        "window",
        "window_slot",
        "num_row_sinks",
        "chunk",
        "num_splits",
        "scale",
        "key_capacity",
        "value_capacity",
    ]
)
def planar_split_kernel(
    query,
    exact_query,
    key_codes,
    key_scale,
    key_zero_point,
    key_levels,
    key_scale_levels,
    key_base,
    key_factor,
    key_extra,
    key_promoted,
    key_outlier_index,
    key_outlier_value,
    key_basis,
    value_codes,
    value_scale,
    value_zero_point,
    value_levels,
    value_scale_levels,
    value_base,
    value_factor,
    value_extra,
    value_promoted,
    value_outlier_index,
    value_outlier_value,
    start_angles,
    offset_angles,
    sink_keys,
    sink_values,
    window_keys,
    window_values,
    row_sink_keys,
    row_sink_values,
    padding,
    mask,
    partial,
    partial_lse,
    scale,
    key_capacity,
    value_capacity,
    query_b,
    query_h,
    query_t,
    sink_keys_b,
    sink_keys_h,
    sink_values_b,
    sink_values_h,
    window_keys_b,
    window_keys_h,
    window_values_b,
    window_values_h,
    mask_b,
    mask_h,
    mask_q,
    num_tiles,
    num_sinks,
    window,
    window_slot,
    num_row_sinks,
    chunk,
    num_splits,
    rows,
    query_length,
    group_heads,
    MASK: tl.constexpr,
    L: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    DH: tl.constexpr,
    ROTARY: tl.constexpr,
    OFFSET: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BASIS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    KEY_BITS: tl.constexpr,
    KEY_GROUP: tl.constexpr,
    KEY_ALONG: tl.constexpr,
    KEY_KIND: tl.constexpr,
    KEY_MIDDLE: tl.constexpr,
    KEY_ZERO_POINT: tl.constexpr,
    KEY_FACTOR: tl.constexpr,
    KEY_PROMOTED: tl.constexpr,
    KEY_OUTLIERS: tl.constexpr,
    DV: tl.constexpr,
    DVP: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    VALUE_GROUP: tl.constexpr,
    VALUE_ALONG: tl.constexpr,
    VALUE_KIND: tl.constexpr,
    VALUE_MIDDLE: tl.constexpr,
    VALUE_ZERO_POINT: tl.constexpr,
    VALUE_FACTOR: tl.constexpr,
    VALUE_PROMOTED: tl.constexpr,
    VALUE_OUTLIERS: tl.constexpr,
    GP: tl.constexpr,
    BN: tl.constexpr,
    BND: tl.constexpr,
    BO: tl.constexpr,
    PADDED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One split of one head, grid `(num_splits + 1, H · ⌈R / GP⌉, B)`, as `decode_split_kernel`.

    The tensors of a side are contiguous `[B, H, capacity, …]`, see `planar_codes_kernel.decoded`; a side of 16 bits
    has `codes` `[B, H, capacity, L, D]` in the model's dtype. `key_basis`, with `BASIS`, is the matrix `[D, D]`,
    float32, that takes stored keys back before they are rotated. `KEY_HEADS` and `VALUE_HEADS` neighbouring heads are
    mixed by a Hadamard matrix. Outliers, `OUTLIERS` of a block, are read `BO` at a time. `start_angles` and
    `offset_angles` are cosines and sines `[n, 2, ROTARY / 2]` of the blocks' starts and of the tokens of a block.
    """
    split = tl.program_id(0)
    row_chunks = tl.cdiv(rows, GP)
    head = tl.program_id(1) // row_chunks
    num_heads = tl.num_programs(1) // row_chunks
    b = tl.program_id(2).to(tl.int64)
    h = head.to(tl.int64)
    row = (tl.program_id(1) % row_chunks) * GP + tl.arange(0, GP)
    row_live = row < rows
    query_head = (head * group_heads + row // query_length).to(tl.int64)
    query_token = (row % query_length).to(tl.int64)
    query_offset = b * query_b + query_head * query_h + query_token * query_t
    mask_rows = mask + b * mask_b + query_head * mask_h + query_token * mask_q
    out_row = ((b * num_heads + h) * rows + row) * (num_splits + 1) + split
    if PADDED:
        pad = tl.load(padding + b).to(tl.int32)
        # Only sinks among the blocks are kept apart; elsewhere the tokens are exact already.
        hidden_from = tl.where(pad > 0, tl.maximum(pad, num_sinks), 0)
        hidden_to = tl.where(pad > 0, tl.minimum(pad + num_row_sinks, window_slot), 0)
    else:
        pad = 0
        hidden_from = 0
        hidden_to = 0
    value_channel = tl.arange(0, DVP)
    if split == num_splits:
        peak, total, acc = exact_tokens(
            exact_query + query_offset,
            row_live,
            sink_keys + b * sink_keys_b + h * sink_keys_h,
            sink_values + b * sink_values_b + h * sink_values_h,
            window_keys + b * window_keys_b + h * window_keys_h,
            window_values + b * window_values_b + h * window_values_h,
            row_sink_keys + (b * num_heads + h) * num_row_sinks * D,
            row_sink_values + (b * num_heads + h) * num_row_sinks * DV,
            num_sinks,
            window,
            window_slot,
            num_row_sinks,
            pad,
            hidden_from,
            hidden_to,
            mask_rows,
            scale,
            MASK,
            D,
            DP,
            DV,
            DVP,
            GP,
            BND,
            PADDED,
            PRECISION,
        )
    else:
        peak = tl.full([GP], FLOOR, tl.float32)
        total = tl.zeros([GP], tl.float32)
        acc = tl.zeros([DVP, GP], tl.float32)
        TILES: tl.constexpr = (L + BN - 1) // BN
        query_rows = query + query_offset
        if KEY_BITS < 16:
            # Columns of a tile are two halves, so that a channel and its partner in RoPE have the same place in both.
            place = tl.arange(0, DH)
            real = place < D // 2
            is_turned = real & (place < ROTARY // 2)
            channel = tl.where(real, channel_of_place(place, D, ROTARY, OFFSET, INTERLEAVED), 0)
            channel2 = tl.where(real, channel_of_place(place + D // 2, D, ROTARY, OFFSET, INTERLEAVED), 0)
            live = row_live[:, None] & real[None, :]
            q = tl.load(query_rows[:, None] + channel[None, :], mask=live, other=0.0).to(tl.float32) * scale
            q2 = tl.load(query_rows[:, None] + channel2[None, :], mask=live, other=0.0).to(tl.float32) * scale
            column = tl.arange(0, 2 * DH)
            column_real = column % DH < D // 2
            column_place = column // DH * (D // 2) + column % DH
            column_channel = channel_of_place(column_place, D, ROTARY, OFFSET, INTERLEAVED)
            column_channel = tl.where(column_real, column_channel, 0)
            if BASIS:
                stored_channel = tl.arange(0, DP)
                stored_real = stored_channel < D
                basis = tl.load(
                    key_basis + stored_channel[:, None] * D + column_channel[None, :],
                    mask=stored_real[:, None] & column_real[None, :],
                    other=0.0,
                )
            else:
                stored_channel = column_channel
                stored_real = column_real
        else:
            wide_channel = tl.arange(0, DP)
            live = row_live[:, None] & (wide_channel < D)[None, :]
            q = tl.load(query_rows[:, None] + wide_channel[None, :], mask=live, other=0.0).to(tl.float32) * scale
        for tile in tl.range(split * chunk, tl.minimum(split * chunk + chunk, num_tiles), num_stages=1):
            block = tile // TILES
            first = tile % TILES * BN
            token = first + tl.arange(0, BN)
            inside = token < L
            if KEY_BITS < 16:
                k = mixed(
                    key_codes,
                    key_scale,
                    key_zero_point,
                    key_levels,
                    key_scale_levels,
                    key_base,
                    key_factor,
                    key_extra,
                    key_promoted,
                    b * num_heads,
                    head,
                    key_capacity,
                    block,
                    token[:, None],
                    stored_channel[None, :],
                    inside[:, None] & stored_real[None, :],
                    D,
                    L,
                    KEY_BITS,
                    KEY_GROUP,
                    KEY_ALONG,
                    KEY_KIND,
                    KEY_MIDDLE,
                    KEY_ZERO_POINT,
                    KEY_FACTOR,
                    KEY_PROMOTED,
                    KEY_HEADS,
                )
                if BASIS:
                    k = tl.dot(k, basis, input_precision=PRECISION)
                k, k2 = tl.split(tl.permute(tl.reshape(k, [BN, 2, DH]), [0, 2, 1]))
                if ROTARY:
                    start_cosine, start_sine = angles_of(start_angles, block, place, is_turned, ROTARY)
                    cosine, sine = angles_of(
                        offset_angles, token[:, None], place[None, :], inside[:, None] & is_turned[None, :], ROTARY
                    )
                    k, k2 = turned(k, k2, start_cosine[None, :], start_sine[None, :], cosine, sine)
                scores = tl.dot(k, tl.trans(q), input_precision=PRECISION)
                scores = tl.dot(k2, tl.trans(q2), acc=scores, input_precision=PRECISION)
                if KEY_OUTLIERS:
                    key_block = (b * num_heads + h) * key_capacity + block
                    for start in tl.range(0, KEY_OUTLIERS, BO, num_stages=1):
                        there, at, of, off = outlier_offsets(
                            key_codes,
                            key_scale,
                            key_zero_point,
                            key_levels,
                            key_scale_levels,
                            key_base,
                            key_factor,
                            key_extra,
                            key_promoted,
                            key_outlier_index,
                            key_outlier_value,
                            key_block,
                            start,
                            first,
                            D,
                            L,
                            KEY_BITS,
                            KEY_GROUP,
                            KEY_ALONG,
                            KEY_KIND,
                            KEY_MIDDLE,
                            KEY_ZERO_POINT,
                            KEY_FACTOR,
                            KEY_PROMOTED,
                            KEY_OUTLIERS,
                            BO,
                            BN,
                        )
                        pull = outlier_queries(
                            query_rows,
                            row_live,
                            start_angles,
                            offset_angles,
                            block,
                            there,
                            at,
                            of,
                            D,
                            ROTARY,
                            OFFSET,
                            INTERLEAVED,
                        )
                        pull = pull * (off * scale)[:, None]
                        same = (token[:, None] == at[None, :]) & there[None, :]
                        scores = tl.dot(same.to(tl.float32), pull, acc=scores, input_precision=PRECISION)
            else:
                key_rows = key_codes + (((b * num_heads + h) * key_capacity + block) * L + token[:, None]) * D
                k = tl.load(
                    key_rows + wide_channel[None, :],
                    mask=inside[:, None] & (wide_channel < D)[None, :],
                    other=0.0,
                )
                scores = tl.dot(k.to(tl.float32), tl.trans(q), input_precision=PRECISION)
            slot = num_sinks + block * L + token
            seen = inside
            if PADDED:
                seen = seen & ((slot < hidden_from) | (slot >= hidden_to))
            scores = masked_scores(scores, slot, seen[:, None], mask_rows, row_live, MASK)
            weights, peak, total, decay = softmax_step(scores, peak, total)
            acc = acc * decay[None, :]
            if VALUE_BITS < 16:
                v = mixed(
                    value_codes,
                    value_scale,
                    value_zero_point,
                    value_levels,
                    value_scale_levels,
                    value_base,
                    value_factor,
                    value_extra,
                    value_promoted,
                    b * num_heads,
                    head,
                    value_capacity,
                    block,
                    token[:, None],
                    value_channel[None, :],
                    inside[:, None] & (value_channel < DV)[None, :],
                    DV,
                    L,
                    VALUE_BITS,
                    VALUE_GROUP,
                    VALUE_ALONG,
                    VALUE_KIND,
                    VALUE_MIDDLE,
                    VALUE_ZERO_POINT,
                    VALUE_FACTOR,
                    VALUE_PROMOTED,
                    VALUE_HEADS,
                )
                acc = tl.dot(tl.trans(v), weights, acc=acc, input_precision=PRECISION)
                if VALUE_OUTLIERS:
                    value_block = (b * num_heads + h) * value_capacity + block
                    for start in tl.range(0, VALUE_OUTLIERS, BO, num_stages=1):
                        there, at, of, off = outlier_offsets(
                            value_codes,
                            value_scale,
                            value_zero_point,
                            value_levels,
                            value_scale_levels,
                            value_base,
                            value_factor,
                            value_extra,
                            value_promoted,
                            value_outlier_index,
                            value_outlier_value,
                            value_block,
                            start,
                            first,
                            DV,
                            L,
                            VALUE_BITS,
                            VALUE_GROUP,
                            VALUE_ALONG,
                            VALUE_KIND,
                            VALUE_MIDDLE,
                            VALUE_ZERO_POINT,
                            VALUE_FACTOR,
                            VALUE_PROMOTED,
                            VALUE_OUTLIERS,
                            BO,
                            BN,
                        )
                        of_token = (at[:, None] == token[None, :]) & there[:, None]
                        part = tl.dot(of_token.to(tl.float32), weights, input_precision=PRECISION)
                        of_channel = (value_channel[:, None] == of[None, :]) & there[None, :]
                        part = part * off[:, None]
                        acc = tl.dot(of_channel.to(tl.float32), part, acc=acc, input_precision=PRECISION)
            else:
                value_rows = value_codes + (((b * num_heads + h) * value_capacity + block) * L + token[:, None]) * DV
                v = tl.load(
                    value_rows + value_channel[None, :],
                    mask=inside[:, None] & (value_channel < DV)[None, :],
                    other=0.0,
                )
                acc = tl.dot(tl.trans(v.to(tl.float32)), weights, acc=acc, input_precision=PRECISION)
    store_partial(
        acc,
        peak,
        total,
        partial + out_row * DV,
        partial_lse + out_row,
        row_live,
        value_channel,
        value_channel < DV,
    )
