"""What every quantizer offers."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from kvquant_hf.config import QuantSpec


@dataclass(frozen=True)
class QuantizedGroups:
    """Rows of codes with the parameters of their groups: `x ≈ scale · code + zero_point`.

    Attributes:
        codes: `[..., length]`, uint8, below `2 ** nbits`.
        scale: `[..., num_groups]`, the dtype it is stored in.
        zero_point: Like `scale`, in the units of `x`; `None` for symmetric codes, whose zero point follows from the
            scale.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    zero_point: torch.Tensor | None


class Quantizer(Protocol):
    """A way to turn rows of numbers into codes, in groups of consecutive elements."""

    def __init__(self, spec: "QuantSpec") -> None: ...

    def quantize(self, rows: torch.Tensor, range_rows: torch.Tensor | None = None) -> QuantizedGroups:
        """Codes of rows.

        Args:
            rows: `[..., length]`, float32. Groups are consecutive elements; the last one may be shorter.
            range_rows: Like `rows`: what the parameters are fitted to, where that differs (padding left out).
                Elements of `rows` outside the fitted range take the nearest code.

        Returns:
            Codes computed against the parameters as stored, that is, after rounding.
        """

    def dequantize(self, codes: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor | None) -> torch.Tensor:
        """Values of codes, `[..., length]`, float32."""
