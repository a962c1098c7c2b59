"""What levels are calibrated on: keys and values in the units of the groups that a cache would form of them."""

from dataclasses import replace

import torch

from kvquant_hf.blocks import rows_of, split_blocks
from kvquant_hf.config import KVQuantConfig
from kvquant_hf.quantizers import places_of, quantizer_of
from kvquant_hf.rope import KeyRotation
from kvquant_hf.spec import TABLE_NBITS, QuantSpec


def even_levels(nbits: int) -> tuple[float, ...]:
    """Evenly spaced levels from -1 to 1."""
    return tuple(torch.linspace(-1, 1, 2**nbits, dtype=torch.float64).tolist())


def check_spec(name: str, spec: QuantSpec) -> None:
    """Raise unless levels can be calibrated for what is stored so.

    Raises:
        ValueError: A setting does not go with listed levels, or ranges would depend on the levels; it is named.
    """
    try:
        replace(spec, levels=even_levels(spec.nbits))
    except ValueError as error:
        raise ValueError(f"no levels can be calibrated for {name} of {spec}: {error}") from error
    if spec.clip != "minmax":
        raise ValueError(
            f"no levels can be calibrated for {name} of {spec}: `clip` must be 'minmax', got {spec.clip!r}, with "
            "which ranges depend on the levels."
        )


def calibrates(spec: QuantSpec) -> bool:
    """Whether codes are narrow enough for listed levels."""
    return spec.nbits in TABLE_NBITS


def whole_blocks(config: KVQuantConfig, tokens: int) -> int:
    """Tokens of a window that fill blocks, the sinks left out.

    Raises:
        ValueError: There are none.
    """
    length = config.block_length
    covered = max(0, tokens - config.sink_length) // length * length
    if not covered:
        raise ValueError(
            f"windows must hold more than sink_length={config.sink_length} and a block of {length} tokens, got "
            f"{tokens}."
        )
    return covered


def group_samples(
    states: torch.Tensor, gradient: torch.Tensor, spec: QuantSpec, length: int, slot: int, rotation: KeyRotation | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Entries in the units of their groups, with what a squared error in these units costs.

    All that happens to keys and values before they are rounded is orthogonal, so gradients take the same way.

    Args:
        states: `[B, H, n · length, D]`, as the model rotated them.
        gradient: Gradient of the loss with respect to them.
        spec: How they are stored.
        length: Tokens in a block.
        slot: Where the first of them lies in the sequence.
        rotation: The rotary embedding to undo, or `None`.

    Returns:
        `[n]` both, float32: entries less the zero point over the scale, and squared gradients times squared scales.
        Entries that are kept exact (`outliers`) and those of constant groups are left out.
    """
    rows, slopes = (rows_of(split_blocks(part, length, slot, rotation), spec) for part in (states, gradient))
    groups = quantizer_of(replace(spec, levels=even_levels(spec.nbits))).quantize(rows)

    def of_entries(parameters: torch.Tensor) -> torch.Tensor:
        return parameters.float().repeat_interleave(spec.group_size, -1)[..., : rows.shape[-1]]

    scale = of_entries(groups.scale)
    offset = rows if groups.zero_point is None else rows - of_entries(groups.zero_point)
    counts = scale > 0
    if groups.outliers is not None:
        flat = torch.ones_like(counts.flatten(-2)).scatter(-1, places_of(groups.outliers.places), False)
        counts = counts & flat.view(counts.shape)
    return (offset / scale)[counts], (slopes * scale).square()[counts]


def thinned(values: torch.Tensor, weights: torch.Tensor, most: int) -> tuple[torch.Tensor, torch.Tensor]:
    """At most so many samples `[n]`, drawn by chance but the same ones each time."""
    if values.numel() <= most:
        return values, weights
    chosen = torch.randperm(values.numel(), generator=torch.Generator().manual_seed(0))[:most].sort().values
    chosen = chosen.to(values.device)
    return values[chosen], weights[chosen]
