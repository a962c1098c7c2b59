"""Whether stored blocks from a file are what the settings say."""

import torch

from kvquant_hf.packing import PlanarLayout
from kvquant_hf.quantizers import check_places
from kvquant_hf.quantizers.promoted import number_dtype
from kvquant_hf.spec import EXTRA_BITS, QuantSpec


def check_state(state: dict[str, torch.Tensor], spec: QuantSpec, block_length: int, head_dim: int) -> None:
    """Refuse what `BlockStore.state` cannot have returned for these settings.

    Args:
        state: The tensors by name, `[B, H, N, …]` each; none for an empty store.
        spec: How the tensor is stored.
        block_length: Tokens in a block.
        head_dim: Size of a key or value vector.

    Raises:
        ValueError: A tensor is missing, is one too many, or has another shape or impossible channels or places.
    """
    if not state:
        return
    expected = _names(spec)
    if set(state) != expected:
        raise ValueError(f"stored blocks must have the tensors {sorted(expected)}, got {sorted(state)}.")
    lead, shapes = tuple(state["codes"].shape[:3]), _shapes(spec, block_length, head_dim)
    for name, tensor in state.items():
        shape = lead + shapes[name]
        if tuple(tensor.shape) != shape:
            raise ValueError(f"stored `{name}` must have the shape {shape}, got {tuple(tensor.shape)}.")
    if "promoted" in state and state["promoted"].numel():
        channels, dtype = state["promoted"].long(), number_dtype(head_dim)
        if state["promoted"].dtype != dtype:
            raise ValueError(f"stored `promoted` must be of {dtype}, got {state['promoted'].dtype}.")
        if int(channels.min()) < 0 or int(channels.max()) >= head_dim or bool((channels.diff(dim=-1) <= 0).any()):
            raise ValueError(f"stored `promoted` must be ascending channels below {head_dim}.")
    if "outlier_index" in state:
        check_places(state["outlier_index"], block_length * head_dim)


def _names(spec: QuantSpec) -> set[str]:
    names = {"codes"}
    if spec.is_quantized:
        names |= {"scale"} if spec.symmetric else {"scale", "zero_point"}
        names |= {"factor"} if spec.has_factor else set()
        names |= {"extra", "promoted"} if spec.promotes else set()
        names |= {"outlier_index", "outlier_value"} if spec.outliers else set()
        names |= {"second_level"} if spec.has_second_level else set()
    return names


def _shapes(spec: QuantSpec, block_length: int, head_dim: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors of a block, by name."""
    if not spec.is_quantized:
        return {"codes": (block_length, head_dim)}
    per_channel = spec.granularity == "per_channel"
    rows, row = (head_dim, block_length) if per_channel else (block_length, head_dim)
    groups, promoted = -(-row // spec.group_size), spec.num_promoted(head_dim)
    outliers = (spec.num_outliers(block_length * head_dim),)
    return {
        "codes": (rows, PlanarLayout(spec.nbits, row).num_bytes),
        "scale": (rows, spec.num_stored("scale", groups)),
        "zero_point": (rows, spec.num_stored("zero_point", groups)),
        "factor": (row,),
        "promoted": (promoted,),
        "extra": (promoted, PlanarLayout(EXTRA_BITS, row).num_bytes),
        "outlier_index": outliers,
        "outlier_value": outliers,
        "second_level": (1 + spec.num_listed(rows * groups),),
    }
