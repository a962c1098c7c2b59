"""Quantizers whose rows fall into groups with a scale and a zero point each."""

from abc import ABC, abstractmethod

import torch

from kvquant_hf.quantizers.base import QuantizedGroups
from kvquant_hf.spec import QuantSpec


class GroupedQuantizer(ABC):
    """What `AffineQuantizer` and `CodebookQuantizer` have in common: parameters are fitted, then rows rounded to them.

    Args:
        spec: Settings.
        nbits: Bits of a code, if not those of the settings.
    """

    def __init__(self, spec: QuantSpec, nbits: int | None = None) -> None:
        self.nbits = spec.nbits if nbits is None else nbits
        self.group_size = spec.group_size
        self.symmetric = spec.symmetric
        self.clip = spec.clip

    def quantize(
        self, rows: torch.Tensor, range_rows: torch.Tensor | None = None, feedback: torch.Tensor | None = None
    ) -> QuantizedGroups:
        """Codes of rows, see `Quantizer.quantize`."""
        scale, zero_point = self.fit_rows(rows if range_rows is None else range_rows)
        return QuantizedGroups(self.codes_of_rows(rows, scale, zero_point, feedback), scale, zero_point)

    def codes_of_rows(
        self,
        rows: torch.Tensor,
        scale: torch.Tensor,
        zero_point: torch.Tensor | None,
        feedback: torch.Tensor | None = None,
        exact: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Codes of rows `[..., length]` against stored parameters `[..., num_groups]`, uint8.

        Args:
            rows: What to round, float32.
            scale: Stored scales.
            zero_point: Likewise.
            feedback: See `Quantizer.quantize`.
            exact: Like `rows`, bool: entries whose codes nobody reads, so that they have no error to feed back.
        """
        unread = None if exact is None else self.grouped(exact)
        codes = self.codes_of_groups(self.grouped(rows), scale, zero_point, feedback, unread)
        return codes.flatten(-2)[..., : rows.shape[-1]]

    @abstractmethod
    def fit_rows(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Scales and zero points `[..., num_groups]` of rows `[..., length]`, as they are stored."""

    @abstractmethod
    def grouped(self, rows: torch.Tensor) -> torch.Tensor:
        """`[..., length]` to `[..., num_groups, group_size]`, a short last group filled up."""

    @abstractmethod
    def codes_of_groups(
        self,
        groups: torch.Tensor,
        scale: torch.Tensor,
        zero_point: torch.Tensor | None,
        feedback: torch.Tensor | None = None,
        exact: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`codes_of_rows` of rows in groups, `[..., num_groups, group_size]` both."""

    @abstractmethod
    def dequantize(self, groups: QuantizedGroups) -> torch.Tensor:
        """Values of codes, see `Quantizer.dequantize`."""
