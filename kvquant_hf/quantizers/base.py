"""What every quantizer offers."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

if TYPE_CHECKING:
    from kvquant_hf.spec import QuantSpec


class Outliers(NamedTuple):
    """Entries that are kept exact beside the codes.

    Attributes:
        places: `[..., K]`, ascending: `row · length + element` within a block. int16, read as unsigned, or int32 where
            a block has more than 65,536 entries.
        value: `[..., K]`, float16 or float32: the entries.
    """

    places: torch.Tensor
    value: torch.Tensor


@dataclass(frozen=True)
class QuantizedGroups:
    """Rows of codes with the parameters of their groups: `x ≈ (scale · code + zero_point) · factor`.

    Attributes:
        codes: `[..., rows, length]`, uint8, below `2 ** nbits`.
        scale: `[..., rows, num_groups]`, the dtype it is stored in; of `turboquant_prod` twice as many, the norms of
            the residuals after the scales; fewer if groups share it (`kvquant_hf.quantizers.shared_groups`).
        zero_point: `[..., rows, num_groups]`, fewer if groups share it, in the units of `x / factor`, of the dtype of
            `scale`; `None` for symmetric codes, whose zero point follows from the scale.
        factor: `[..., length]`, one number per element of a row, the same for all rows of a block: per token for keys
            whose rows are channels, per channel for values whose rows are tokens. `None`: 1.
        promoted: `[..., P]`, uint8 (int16 beyond 256 rows), ascending: rows with codes of two more bits, below
            `2 ** (nbits + 2)`.
        outliers: Entries that are these values, whatever their codes say.
        second_level: `[..., 1 + listed]`: what scales and zero points are relative to where these are uint8
            (`kvquant_hf.quantizers.second_level`, for `e2m1` codes `kvquant_hf.quantizers.nvfp4`).
    """

    codes: torch.Tensor
    scale: torch.Tensor
    zero_point: torch.Tensor | None
    factor: torch.Tensor | None = None
    promoted: torch.Tensor | None = None
    outliers: Outliers | None = None
    second_level: torch.Tensor | None = None


class Quantizer(Protocol):
    """A way to turn rows of numbers into codes, in groups of consecutive elements."""

    def __init__(self, spec: "QuantSpec") -> None: ...

    def quantize(
        self, rows: torch.Tensor, range_rows: torch.Tensor | None = None, feedback: torch.Tensor | None = None
    ) -> QuantizedGroups:
        """Codes of rows.

        Args:
            rows: `[..., rows, length]`, float32: whole blocks. Groups are consecutive elements of a row; the last one
                may be shorter.
            range_rows: Like `rows`: what the parameters are fitted to, where that differs (padding left out).
                Elements of `rows` outside the fitted range take the nearest code.
            feedback: `[H, rows, rows]`, float32, for rows `[B, H, n, rows, length]`: rows are rounded from the last to
                the first, and the error of row `j` times entry `[h, j, i]` is taken from every row `i < j` before its
                turn (`QueryMoments.feedback`). Scales and zero points stay those of the rows as they came.

        Returns:
            Codes computed against the parameters as stored, that is, after rounding. They have a `factor` if and only
            if `QuantSpec.has_factor` says so.
        """

    def dequantize(self, groups: QuantizedGroups) -> torch.Tensor:
        """Values of codes, `[..., rows, length]`, float32."""
