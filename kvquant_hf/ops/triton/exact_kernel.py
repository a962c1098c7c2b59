"""Tokens that are kept exact, and what any program does with scores: mask, softmax, partial output.

Matrix products have tokens, then channels, on the wide side, see `segments_kernel.py`; sizes as in `decode_kernel.py`.
"""

import triton
import triton.language as tl

# Scores of tokens that are not attended to. Running maxima start at FLOOR, so that their weights are exactly zero
# even where a row has met no other token.
MASKED = tl.constexpr(-1e30)
FLOOR = tl.constexpr(-1e20)
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def masked_scores(scores, slot, live, mask_rows, mask_row_live, MASK: tl.constexpr):
    """Scores `[N, GP]` in units of log2 with the mask applied; `live` `[N]` or `[N, GP]`."""
    keep = live
    if MASK > 0:
        found = tl.load(mask_rows[None, :] + slot[:, None], mask=live & mask_row_live[None, :], other=0)
        if MASK == 1:
            keep = live & (found != 0)
        else:
            scores += found.to(tl.float32) * LOG2E
    return tl.where(keep, scores, MASKED)


@triton.jit
def softmax_step(scores, peak, total):
    """Weights `[N, GP]` of a tile, the new peak and sum `[GP]`, and the factor for what was summed before."""
    new_peak = tl.maximum(peak, tl.max(scores, 0))
    decay = tl.exp2(peak - new_peak)
    weights = tl.exp2(scores - new_peak[None, :])
    return weights, new_peak, total * decay + tl.sum(weights, 0), decay


@triton.jit
def exact_segment(
    query,
    keys,
    values,
    count,
    first_slot,
    low_slot,
    high_slot,
    peak,
    total,
    acc,
    mask_rows,
    mask_row_live,
    MASK: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    DV: tl.constexpr,
    DVP: tl.constexpr,
    BND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Tokens `[count, D]` stored as they are; those with slots outside `low_slot … high_slot - 1` are left out."""
    channel = tl.arange(0, DP)
    value_channel = tl.arange(0, DVP)
    for start in range(0, count, BND):
        token = start + tl.arange(0, BND)
        here = token < count
        k = tl.load(
            keys + token[:, None] * D + channel[None, :], mask=here[:, None] & (channel[None, :] < D), other=0.0
        )
        scores = tl.dot(k.to(tl.float32), tl.trans(query), input_precision=PRECISION)
        slot = first_slot + token
        live = here & (slot >= low_slot) & (slot < high_slot)
        scores = masked_scores(scores, slot, live[:, None], mask_rows, mask_row_live, MASK)
        weights, peak, total, decay = softmax_step(scores, peak, total)
        v = tl.load(
            values + token[:, None] * DV + value_channel[None, :],
            mask=here[:, None] & (value_channel[None, :] < DV),
            other=0.0,
        )
        acc = acc * decay[None, :] + tl.dot(tl.trans(v.to(tl.float32)), weights, input_precision=PRECISION)
    return peak, total, acc


@triton.jit
def exact_tokens(
    query_rows,
    row_live,
    sink_keys,
    sink_values,
    window_keys,
    window_values,
    row_sink_keys,
    row_sink_values,
    num_sinks,
    window,
    window_slot,
    num_row_sinks,
    pad,
    hidden_from,
    hidden_to,
    mask_rows,
    scale,
    MASK: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    DV: tl.constexpr,
    DVP: tl.constexpr,
    GP: tl.constexpr,
    BND: tl.constexpr,
    PADDED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Sinks, residual window and sinks of padded rows of one head: peak, sum of weights and output `[DVP, GP]`."""
    channel = tl.arange(0, DP)
    q = tl.load(query_rows[:, None] + channel[None, :], mask=row_live[:, None] & (channel[None, :] < D), other=0.0)
    q = q.to(tl.float32) * scale
    peak = tl.full([GP], FLOOR, tl.float32)
    total = tl.zeros([GP], tl.float32)
    acc = tl.zeros([DVP, GP], tl.float32)
    everything = 2147483647
    peak, total, acc = exact_segment(
        q,
        sink_keys,
        sink_values,
        num_sinks,
        0,
        0,
        everything,
        peak,
        total,
        acc,
        mask_rows,
        row_live,
        MASK,
        D,
        DP,
        DV,
        DVP,
        BND,
        PRECISION,
    )
    peak, total, acc = exact_segment(
        q,
        window_keys,
        window_values,
        window,
        window_slot,
        0,
        everything,
        peak,
        total,
        acc,
        mask_rows,
        row_live,
        MASK,
        D,
        DP,
        DV,
        DVP,
        BND,
        PRECISION,
    )
    if PADDED:
        peak, total, acc = exact_segment(
            q,
            row_sink_keys,
            row_sink_values,
            num_row_sinks,
            pad,
            hidden_from,
            hidden_to,
            peak,
            total,
            acc,
            mask_rows,
            row_live,
            MASK,
            D,
            DP,
            DV,
            DVP,
            BND,
            PRECISION,
        )
    return peak, total, acc


@triton.jit
def store_partial(acc, peak, total, rows, lse_rows, row_live, channel, channel_live):
    """Output `[DVP, GP]` over its sum of weights, and the log-sum-exp; zeros and `MASKED` without any weight."""
    alive = total > 0
    safe = tl.where(alive, total, 1.0)
    tl.store(
        rows[None, :] + channel[:, None],
        acc / safe[None, :],
        mask=row_live[None, :] & channel_live[:, None],
    )
    tl.store(lse_rows, tl.where(alive, peak + tl.log2(safe), MASKED), mask=row_live)
