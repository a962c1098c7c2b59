"""Split-K decode attention over packed keys and values, and over the tokens kept exact.

Sizes: `B` rows of the batch, `H` key/value heads, `R` query rows of one of them (grouped heads times new tokens), `T`
tokens held as codes, `D`, `DV` channels. A program treats one batch row, one head, `GP` query rows and one split: a
range of `chunk` packed tokens, or, as the last split, sinks and residual window. It writes a normalized output and
its log-sum-exp (base 2); `combine_kernel` puts splits together.
"""

import triton
import triton.language as tl

from kvquant_hf.ops.triton.blocks_kernel import place_of_column
from kvquant_hf.ops.triton.exact_kernel import exact_tokens, store_partial
from kvquant_hf.ops.triton.segments_kernel import packed_segment


@triton.jit(
    do_not_specialize=[
        "num_tokens",
        "num_sinks",
        "window",
        "window_slot",
        "num_row_sinks",
        "chunk",
        "num_splits",
        "scale",
    ]
)
def decode_split_kernel(
    query,
    exact_query,
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
    query_b,
    query_h,
    query_t,
    key_codes_b,
    key_codes_h,
    key_metadata_b,
    key_metadata_h,
    value_codes_b,
    value_codes_h,
    value_metadata_b,
    value_metadata_h,
    key_factor_b,
    key_factor_h,
    value_factor_b,
    value_factor_h,
    key_extra_b,
    key_extra_h,
    key_promoted_b,
    key_promoted_h,
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
    num_tokens,
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
    BND: tl.constexpr,
    STAGES: tl.constexpr,
    PADDED: tl.constexpr,
    ASM: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One split of one head, grid `(num_splits + 1, H · ⌈R / GP⌉, B)`; see the top of the file.

    `exact_query` is the query for tokens kept exact, `query` the one for blocks (in the Hadamard basis where keys
    are); both have the strides `query_*`, in elements. Codes and parameters are as `WordLayout` lays them out, or
    `[B, H, T, D]` where a side has 16 bits; factors, with `KEY_FACTOR` and `VALUE_FACTOR`, are `[B, H, T]` of keys and
    `[B, H, T / L, DV]` of values, float16 or float32; with `VALUE_BYTES` the factors of values are the bases of their
    scales, `[B, H, T / L]`; low bits of `PROMOTED` channels of a block are
    `[B, H, T / L, PROMOTED, L / 16]` int32, the channels' numbers `[B, H, T / L, PROMOTED]` uint8. Tables and angles
    of starts and offsets come from `tables.py`. `mask` has the kinds 0 none, 1 bytes (non-zero: attend), 2 additive.
    `partial`: float32 `[B, H, R, num_splits + 1, DV]`, `partial_lse` likewise without the last axis.
    """
    split = tl.program_id(0)
    row_chunks = tl.cdiv(rows, GP)
    head = tl.program_id(1) // row_chunks
    num_heads = tl.num_programs(1) // row_chunks
    b = tl.program_id(2).to(tl.int64)
    h = head.to(tl.int64)
    row = (tl.program_id(1) % row_chunks) * GP + tl.arange(0, GP)
    row_live = row < rows
    query_head = head * group_heads + row // query_length
    query_token = row % query_length
    query_offset = b * query_b + query_head.to(tl.int64) * query_h + query_token * query_t
    mask_rows = mask + b * mask_b + query_head.to(tl.int64) * mask_h + query_token.to(tl.int64) * mask_q
    out_row = ((b * num_heads + h) * rows + row) * (num_splits + 1) + split
    if PADDED:
        pad = tl.load(padding + b).to(tl.int32)
        # Only sinks among the blocks are kept apart; elsewhere the tokens are exact already.
        hidden_from = tl.where(pad > 0, tl.maximum(pad, num_sinks), 0)
        hidden_to = tl.where(pad > 0, tl.minimum(pad + num_row_sinks, num_sinks + num_tokens), 0)
    else:
        pad = 0
        hidden_from = 0
        hidden_to = 0
    if split < num_splits:
        first_token = split * chunk
        peak, total, acc = packed_segment(
            query + query_offset,
            row_live,
            key_codes + b * key_codes_b + h * key_codes_h,
            key_metadata + b * key_metadata_b + h * key_metadata_h,
            value_codes + b * value_codes_b + h * value_codes_h,
            value_metadata + b * value_metadata_b + h * value_metadata_h,
            key_factor + b * key_factor_b + h * key_factor_h,
            value_factor + b * value_factor_b + h * value_factor_h,
            key_extra + b * key_extra_b + h * key_extra_h,
            key_promoted + b * key_promoted_b + h * key_promoted_h,
            start_table,
            offset_table,
            start_angles,
            offset_angles,
            first_token,
            tl.minimum(first_token + chunk, num_tokens),
            num_sinks,
            hidden_from,
            hidden_to,
            mask_rows,
            row_live,
            scale,
            MASK,
            D,
            DP,
            KEY_BITS,
            KEY_GROUP,
            KEY_SYMMETRIC,
            KW,
            KWP,
            KROW,
            ROTARY,
            OFFSET,
            INTERLEAVED,
            DV,
            DVP,
            VALUE_BITS,
            VALUE_GROUP,
            VALUE_SYMMETRIC,
            VW,
            VWP,
            VROW,
            KEY_FACTOR,
            VALUE_FACTOR,
            VALUE_BYTES,
            PROMOTED,
            PP,
            L,
            GP,
            BN,
            STAGES,
            PADDED,
            ASM,
            PRECISION,
        )
        column = tl.arange(0, DVP)
        if VALUE_BITS < 16:
            channel, channel_live = place_of_column(column, 16 // (2 if VALUE_BITS == 3 else VALUE_BITS), VW)
        else:
            channel = column
            channel_live = column < DV
        store_partial(acc, peak, total, partial + out_row * DV, partial_lse + out_row, row_live, channel, channel_live)
    else:
        VP: tl.constexpr = triton.next_power_of_2(DV)
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
            VP,
            GP,
            BND,
            PADDED,
            PRECISION,
        )
        value_channel = tl.arange(0, VP)
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
