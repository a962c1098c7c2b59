"""Tensors of a view as arguments of the decode kernel, with their strides in elements."""

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from kvquant_hf.storage import BlockStore


def strides(name: str, tensor: torch.Tensor | None, axes: str) -> dict[str, int]:
    """Strides of the first axes, in elements, named `name_axis`."""
    strides = [0] * len(axes) if tensor is None else tensor.stride()
    return {f"{name}_{axis}": strides[i] for i, axis in enumerate(axes)}


def block_arguments(side: str, store: "BlockStore", nothing: torch.Tensor) -> dict[str, Any]:
    """Buffers of codes, parameters and factors (scales of a byte: their bases) with their strides."""
    metadata = store.codes if store.metadata is None else store.metadata
    factor = store.second_level if store.factor is None else store.factor
    factor = metadata if factor is None else factor
    return {
        f"{side}_codes": nothing if store.codes is None else store.codes,
        f"{side}_metadata": nothing if metadata is None else metadata,
        f"{side}_factor": nothing if factor is None else factor,
        **strides(f"{side}_codes", store.codes, "bh"),
        **strides(f"{side}_metadata", metadata, "bh"),
        **strides(f"{side}_factor", factor, "bh"),
    }


def promotion_arguments(key: "BlockStore", nothing: torch.Tensor) -> dict[str, Any]:
    """Low bits and numbers of promoted channels, with their strides."""
    return {
        "key_extra": nothing if key.extra is None else key.extra,
        "key_promoted": nothing if key.promoted is None else key.promoted,
        **strides("key_extra", key.extra, "bh"),
        **strides("key_promoted", key.promoted, "bh"),
    }


def mask_arguments(mask: torch.Tensor | None, nothing: torch.Tensor) -> dict[str, Any]:
    """A mask with its kind and its strides over `B`, `H_q` and `q_len`."""
    if mask is None:
        return {"mask": nothing, "MASK": 0, "mask_b": 0, "mask_h": 0, "mask_q": 0}
    kind = 1 if mask.dtype == torch.bool else 2
    if mask.stride(3) != 1:
        mask = mask.contiguous()
    strides = [0 if size == 1 else step for size, step in zip(mask.shape[:3], mask.stride()[:3], strict=True)]
    return {
        "mask": mask.view(torch.uint8) if kind == 1 else mask,
        "MASK": kind,
        **{f"mask_{axis}": step for axis, step in zip("bhq", strides, strict=True)},
    }
