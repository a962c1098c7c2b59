"""Putting splits together: weighted mean of their outputs by log-sum-exp, values rotated back."""

import triton
import triton.language as tl

MASKED = tl.constexpr(-1e30)


@triton.jit
def hadamard_stage(x, HALF: tl.constexpr, SIZE: tl.constexpr):
    """Sums and differences of elements `HALF` apart of a vector `[SIZE]`."""
    pairs = tl.permute(tl.reshape(x, [SIZE // (2 * HALF), 2, HALF]), [0, 2, 1])
    first, second = tl.split(pairs)
    mixed = tl.permute(tl.join(first + second, first - second), [0, 2, 1])
    return tl.reshape(mixed, [SIZE])


@triton.jit(do_not_specialize=["num_splits"])
def combine_kernel(
    partial,
    partial_lse,
    output,
    signs,
    order,
    num_splits,
    rows,
    query_length,
    group_heads,
    DV: tl.constexpr,
    DVP: tl.constexpr,
    BS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROOT: tl.constexpr,
    SIGNS: tl.constexpr,
    ORDER: tl.constexpr,
):
    """One query row, grid `(B · H · R,)`.

    Args:
        partial: float32 `[B, H, R, num_splits + 1, DV]`, the last split being the exact tokens.
        partial_lse: float32 `[B, H, R, num_splits + 1]`, base 2.
        output: `[B, H_q, q_len, DV]`, contiguous; row `r` is query head `r // q_len` of its group, token `r % q_len`.
        signs: float32 `[DV]`: what the channels of packed values are multiplied by in the end, with `SIGNS`.
        order: int32 `[DV]`: channel of each place of packed values, with `ORDER`.
        num_splits: Splits over packed tokens.
        rows: `R`.
        query_length: `q_len`.
        group_heads: Query heads of a key/value head.
        DV: Channels of a value.
        DVP: The same, rounded up to a power of two.
        BS: Splits treated at a time.
        WIDTH: Size of the Hadamard blocks that packed values are in, 0 without a rotation.
        ROOT: Square root of it.
        SIGNS: Whether there are signs.
        ORDER: Whether there is an order.
    """
    pid = tl.program_id(0).to(tl.int64)
    first = pid * (num_splits + 1)
    place = tl.arange(0, DVP)
    channel = place
    if ORDER:
        channel = tl.load(order + place, mask=place < DV, other=0)
    peak = tl.load(partial_lse + first + num_splits)
    # The packed splits are summed apart from the exact one, which is in the plain basis.
    exact = tl.load(partial + (first + num_splits) * DV + channel, mask=place < DV, other=0.0)
    exact_weight = tl.where(peak > 0.5 * MASKED, 1.0, 0.0)
    total = 0.0
    acc = tl.zeros([DVP], tl.float32)
    for start in range(0, num_splits, BS):
        split = start + tl.arange(0, BS)
        lse = tl.load(partial_lse + first + split, mask=split < num_splits, other=MASKED)
        new_peak = tl.maximum(peak, tl.max(lse, 0))
        decay = tl.exp2(peak - new_peak)
        weights = tl.where(lse > 0.5 * MASKED, tl.exp2(lse - new_peak), 0.0)
        found = tl.load(
            partial + (first + split)[:, None] * DV + place[None, :],
            mask=(split < num_splits)[:, None] & (place < DV)[None, :],
            other=0.0,
        )
        acc = acc * decay + tl.sum(found * weights[:, None], 0)
        total = total * decay + tl.sum(weights, 0)
        exact_weight = exact_weight * decay
        peak = new_peak
    if WIDTH:
        # Padding lies behind all whole blocks of `WIDTH` channels, so zeros mix with zeros only.
        for stage in tl.static_range(0, 8):
            if 2 ** (stage + 1) <= WIDTH:
                acc = hadamard_stage(acc, 2**stage, DVP)
        acc = acc / ROOT
    if SIGNS:
        acc = acc * tl.load(signs + place, mask=place < DV, other=0.0)
    total += exact_weight
    acc = (acc + exact * exact_weight) / tl.where(total > 0, total, 1.0)
    group = pid // rows
    row = pid % rows
    head = group * group_heads + row // query_length
    begin = (head * query_length + row % query_length) * DV
    tl.store(output + begin + channel, acc.to(output.dtype.element_ty), mask=place < DV)
