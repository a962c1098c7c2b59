"""Rounding row after row, what one row is off by being made good in those still to come."""

from collections.abc import Callable

import torch

# Codes and values `[B, H, n, groups, n]` of the row of that number, given what it should be.
RoundRow = Callable[[int, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def codes_with_feedback(
    groups: torch.Tensor, feedback: torch.Tensor, round_row: RoundRow, exact: torch.Tensor | None = None
) -> torch.Tensor:
    """Codes of rows, from the last one to the first (LDLQ, QuIP, arXiv 2307.13304, section 3.1).

    Args:
        groups: `[B, H, n, rows, groups, n]`, float32.
        feedback: `[H, rows, rows]`, see `Quantizer.quantize`.
        round_row: Rounds one row.
        exact: Like `groups`, bool: entries whose codes nobody reads, so that they have no error to feed back.

    Returns:
        Like `groups`, uint8.
    """
    targets, codes = groups.clone(), torch.empty_like(groups, dtype=torch.uint8)
    feedback = feedback[:, None, :, :, None, None]
    for row in reversed(range(groups.shape[3])):
        found, values = round_row(row, targets[:, :, :, row])
        codes[:, :, :, row] = found
        error = values.sub_(groups[:, :, :, row])
        if exact is not None:
            error.masked_fill_(exact[:, :, :, row], 0.0)
        # One row at a time: the order of the sums must not depend on how many blocks there are.
        targets[:, :, :, :row] -= feedback[:, :, row, :row] * error[:, :, :, None]
    return codes


def row_of(parameters: torch.Tensor | None, row: int) -> torch.Tensor | None:
    """Parameters `[B, H, n, groups]` of one row of `[B, H, n, rows, groups]`, if there are any."""
    return None if parameters is None else parameters[:, :, :, row]
