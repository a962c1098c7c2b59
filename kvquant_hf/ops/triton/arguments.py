"""Arguments that the decode kernels share: tensors of a view with their strides in elements, and splits."""

import math
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from kvquant_hf.storage import BlockStore
    from kvquant_hf.view import KVView

_LOG2E = math.log2(math.e)
# Programs per multiprocessor that are aimed at: two are resident at once by their registers.
_WAVES = 2


def power_of_two(number: int) -> int:
    """The smallest power of two that is no smaller."""
    return 1 << max(0, number - 1).bit_length()


@cache
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a GPU; two for the interpreter."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 2


def splits_of(tiles: int, programs: int, device: torch.device) -> tuple[int, int]:
    """Tiles of a split, and the number of splits, for so many programs a split."""
    wanted = max(1, -(-_WAVES * multiprocessors(device) // programs))
    chunk = max(1, -(-tiles // wanted))
    return chunk, -(-tiles // chunk)


def row_tile(rows: int) -> int:
    """Query rows of a program."""
    return 8 if rows <= 8 else 16


def common_arguments(
    query: torch.Tensor,
    folded: torch.Tensor,
    view: "KVView",
    mask: torch.Tensor | None,
    scale: float,
    splits: int,
) -> dict[str, Any]:
    """What both decode kernels are told of queries, exact tokens, mask and output; scratch memory included.

    Args:
        query: `[B, H_q, q_len, D]`, channels side by side.
        folded: The query for blocks, with the strides of `query`.
        view: Layer contents.
        mask: As for `decode_attention`.
        scale: Factor of the scores.
        splits: Splits over packed tokens.
    """
    batch_size, num_heads, q_len, _ = query.shape
    heads, value_dim = view.key_shape[1], view.value_shape[3]
    rows = num_heads // heads * q_len
    partial = torch.empty(batch_size, heads, rows, splits + 1, value_dim, device=view.device)
    partial_lse = torch.empty(batch_size, heads, rows, splits + 1, device=view.device)
    nothing = partial_lse  # stands in for what is not there; never read
    window = 0 if view.residual is None else view.residual[0].shape[2]
    arguments: dict[str, Any] = {
        "query": folded,
        "exact_query": query,
        "partial": partial,
        "partial_lse": partial_lse,
        "scale": scale * _LOG2E,
        "num_sinks": view.num_sinks,
        "window": window,
        "window_slot": view.kv_len - window,
        "num_row_sinks": 0 if view.row_sinks is None else view.row_sinks[0].shape[2],
        "num_splits": splits,
        "rows": rows,
        "query_length": q_len,
        "group_heads": num_heads // heads,
        "padding": nothing if view.padding is None else view.padding,
        **strides("query", folded, "bht"),
        **mask_arguments(mask, nothing),
        "GP": row_tile(rows),
        "PADDED": view.padding is not None and view.row_sinks is not None,
        "PRECISION": "tf32",
    }
    for name, pair in (("sink", view.sinks), ("window", view.residual), ("row_sink", view.row_sinks)):
        for side, tensor in zip(("keys", "values"), pair or (None, None), strict=True):
            arguments[f"{name}_{side}"] = nothing if tensor is None else tensor
            if name != "row_sink":
                arguments |= strides(f"{name}_{side}", tensor, "bh")
    return arguments


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
