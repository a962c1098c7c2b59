"""Calling the decode kernels: which views they take, and the arguments they are handed."""

import contextlib
import math
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from kvquant_hf.ops.triton import planar
from kvquant_hf.ops.triton.arguments import (
    block_arguments,
    common_arguments,
    power_of_two,
    promotion_arguments,
    row_tile,
    splits_of,
)
from kvquant_hf.ops.triton.availability import why_unavailable
from kvquant_hf.ops.triton.layout import WordLayout, reads_rotation, unread_codes
from kvquant_hf.ops.triton.tables import angle_table, offset_angle_table, offset_table, start_table
from kvquant_hf.ops.triton.tuning import Launch, launch_parameters
from kvquant_hf.rotation import hadamard_width, order_index, signs

if TYPE_CHECKING:
    from kvquant_hf.storage import BlockStore
    from kvquant_hf.view import KVView

MAX_HEAD_DIM = 256


def unsupported(view: "KVView") -> str | None:
    """Why no kernel can read a view, or `None` if one can."""
    return None if not_in_words(view) is None else planar.unsupported(view)


def not_in_words(view: "KVView") -> str | None:
    """Why the kernel that reads words cannot read a view, or `None` if it can; found once for the blocks that are."""
    memo = view.memo
    if "words" not in memo:
        memo["words"] = _obstacle(view)
    found: str | None = memo["words"]
    return found


def _obstacle(view: "KVView") -> str | None:
    key, value = view.key_store, view.value_store
    if torch.float64 in (view.key_dtype, view.value_dtype):
        return "float64"
    for spec in (key.spec, value.spec):
        if (reason := unread_codes(spec)) is not None:
            return reason
    if key.spec.is_quantized and key.spec.granularity != "per_channel":
        return f"keys {key.spec.granularity}"
    if value.spec.is_quantized and value.spec.granularity != "per_token":
        return f"values {value.spec.granularity}"
    for name, spec in (("keys", key.spec), ("values", value.spec)):
        if not reads_rotation(spec):
            return f"{name} with rotation={spec.rotation!r}"
    if key.spec.is_quantized and key.spec.rotation != "none" and view.rotation is not None:
        return "a Hadamard rotation of pre-RoPE keys"
    for store in (key, value):
        if store.head_dim > MAX_HEAD_DIM or (store.spec.is_quantized and store.head_dim % 16):
            return f"head sizes {key.head_dim} and {value.head_dim} (multiples of 16 up to {MAX_HEAD_DIM})"
        if store.spec.is_quantized and not isinstance(store.own_layout, WordLayout):
            return "blocks in the common layout"
    return None


def uses_ptx() -> bool:
    """Whether kernels may contain PTX instructions."""
    return torch.version.hip is None


@cache
def _arch(device: torch.device) -> str:
    if device.type != "cuda":
        return "interpreter"
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        return str(properties.gcnArchName).split(":")[0]
    return f"{properties.major}{properties.minor}"


def decode_attention(
    query: torch.Tensor, view: "KVView", mask: torch.Tensor | None, scale: float, launch: Launch | None = None
) -> torch.Tensor:
    """Attention over the packed codes in two launches, see `kvquant_hf.ops.decode_attention`.

    Args:
        query: `[B, H_q, q_len, D]`.
        view: Layer contents.
        mask: `[B|1, H_q|1, q_len|1, T]`, boolean or additive, or `None`.
        scale: Factor of the scores.
        launch: Launch parameters; those of the table by default.

    Raises:
        ValueError: The kernels cannot run here or cannot read this view, or a gradient is asked for.
    """
    reason = why_unavailable(view.device)
    if reason is not None:
        raise ValueError(f"`backend='triton'` is not available for these tensors: {reason}.")
    reason = unsupported(view)
    if reason is not None:
        raise ValueError(f"`backend='triton'` does not read {reason}; use 'auto' or 'torch'.")
    if torch.is_grad_enabled() and (query.requires_grad or (mask is not None and mask.requires_grad)):
        raise ValueError("`backend='triton'` computes no gradients; use 'auto' or 'torch'.")
    view.check_current()
    with torch.cuda.device(view.device) if view.device.type == "cuda" else contextlib.nullcontext():
        return _launch(query.detach(), view, mask, scale, launch)


def _launch(
    query: torch.Tensor, view: "KVView", mask: torch.Tensor | None, scale: float, launch: Launch | None
) -> torch.Tensor:
    from kvquant_hf.ops.triton.decode_kernel import decode_split_kernel
    from kvquant_hf.ops.triton.planar_kernel import planar_split_kernel

    if not_in_words(view) is not None:
        grid, arguments = planar.split_arguments(query, view, mask, scale)
        planar_split_kernel[grid](**arguments, num_warps=4)
        return _combined(query, view, arguments)
    if launch is None:
        widths = min(view.key_store.spec.nbits, view.value_store.spec.nbits)
        launch = launch_parameters(max(query.shape[3], view.value_shape[3]), widths, _arch(view.device))
    grid, arguments = split_arguments(query, view, mask, scale, launch)
    decode_split_kernel[grid](**arguments, **launch_options(launch))
    return _combined(query, view, arguments)


def _combined(query: torch.Tensor, view: "KVView", arguments: dict[str, Any]) -> torch.Tensor:
    """Output of the splits that a decode kernel left in its scratch memory."""
    from kvquant_hf.ops.triton.combine_kernel import combine_kernel

    batch_size, num_heads, q_len, _ = query.shape
    output = torch.empty(batch_size, num_heads, q_len, view.value_shape[3], dtype=query.dtype, device=view.device)
    partial = arguments["partial"]
    combine_kernel[(partial.shape[0] * partial.shape[1] * partial.shape[2],)](
        **combine_arguments(partial, arguments["partial_lse"], output, view), num_warps=4
    )
    return output


def launch_options(launch: Launch) -> dict[str, int]:
    """Options of the compiler."""
    options = {"num_warps": launch.num_warps}
    if launch.max_registers is not None and uses_ptx():
        options["maxnreg"] = launch.max_registers
    return options


def split_arguments(
    query: torch.Tensor, view: "KVView", mask: torch.Tensor | None, scale: float, launch: Launch
) -> tuple[tuple[int, int, int], dict[str, Any]]:
    """Grid and arguments of `decode_split_kernel`, scratch memory included."""
    key, value = view.key_store, view.value_store
    if _keeps_to_blocks(view):
        launch = replace(launch, BN=min(launch.BN, view.block_length))
    batch_size, heads = view.key_shape[:2]
    rows = query.shape[1] // heads * query.shape[2]
    row_chunks = -(-rows // row_tile(rows))
    tokens = view.num_blocks * view.block_length
    chunk, splits = splits_of(-(-tokens // launch.BN), batch_size * heads * row_chunks, view.device)
    query = query if query.stride(3) == 1 else query.contiguous()
    folded = query
    if key.spec.is_quantized and key.spec.rotation != "none":
        query = query.float().contiguous()
        folded = view.fold_query(query).contiguous()
    arguments = common_arguments(query, folded, view, mask, scale, splits)
    nothing = arguments["partial_lse"]
    constants = _constants(view)
    arguments |= {
        "num_tokens": tokens,
        "chunk": chunk * launch.BN,
        **block_arguments("key", key, nothing),
        **block_arguments("value", value, nothing),
        **promotion_arguments(key, nothing),
        **_rotation_arguments(view, launch.BN, constants, nothing),
        **constants,
        "BN": launch.BN,
        "BND": launch.BND,
        "STAGES": launch.num_stages,
        "ASM": uses_ptx(),
    }
    return (splits + 1, heads * row_chunks, batch_size), arguments


def combine_arguments(
    partial: torch.Tensor, partial_lse: torch.Tensor, output: torch.Tensor, view: "KVView"
) -> dict[str, Any]:
    """Arguments of `combine_kernel`."""
    spec, value_dim = view.value_store.spec, output.shape[3]
    is_rotated = spec.is_quantized and spec.rotation != "none"
    width = hadamard_width(value_dim) if is_rotated else 0
    has_signs = is_rotated and spec.rotation == "hadamard_signs"
    has_order = is_rotated and bool(spec.channel_order)
    return {
        "partial": partial,
        "partial_lse": partial_lse,
        "output": output,
        "signs": signs(value_dim, output.device) if has_signs else partial_lse,
        "order": order_index(spec.channel_order, output.device)[0] if has_order else partial_lse,
        "num_splits": partial.shape[3] - 1,
        "rows": partial.shape[2],
        "query_length": output.shape[2],
        "group_heads": output.shape[1] // partial.shape[1],
        "DV": value_dim,
        "DVP": power_of_two(value_dim),
        "BS": 16,
        "WIDTH": width,
        "ROOT": math.sqrt(width),
        "SIGNS": has_signs,
        "ORDER": has_order,
    }


def _keeps_to_blocks(view: "KVView") -> bool:
    """Whether a tile lies within one block, whose factors, base or promoted channels are its own."""
    value = view.value_store.spec
    return value.has_factor or value.has_second_level or view.key_store.spec.promotes


def _constants(view: "KVView") -> dict[str, Any]:
    """Compile-time arguments of both sides."""
    key, value = view.key_store, view.value_store
    order = key.own_layout.order if isinstance(key.own_layout, WordLayout) else None
    rotary = 0 if order is None or view.rotation is None else order.rotary_dim
    key_words, key_row = _words(key)
    value_words, value_row = _words(value)
    value_padded = power_of_two(value_words)
    packed_value_columns = 2 * value_padded * _planes(value)
    return {
        "D": key.head_dim,
        "DP": max(16, power_of_two(key.head_dim)),
        "KEY_BITS": key.spec.nbits,
        "KEY_GROUP": key.spec.group_size,
        "KEY_SYMMETRIC": key.spec.symmetric,
        "KW": key_words,
        "KWP": _padded_key_words(key),
        "KROW": key_row,
        "ROTARY": rotary,
        "OFFSET": 0 if order is None else order.offset,
        "INTERLEAVED": order is not None and order.interleaved,
        "DV": value.head_dim,
        "DVP": packed_value_columns if value.spec.is_quantized else max(16, power_of_two(value.head_dim)),
        "VALUE_BITS": value.spec.nbits,
        "VALUE_GROUP": value.spec.group_size,
        "VALUE_SYMMETRIC": value.spec.symmetric,
        "VW": value_words,
        "VWP": value_padded,
        "VROW": value_row,
        "KEY_FACTOR": key.spec.has_factor,
        "VALUE_FACTOR": value.spec.has_factor,
        "VALUE_BYTES": value.spec.has_second_level,
        "PROMOTED": key.spec.num_promoted(key.head_dim),
        "PP": max(16, power_of_two(key.spec.num_promoted(key.head_dim))),
        # Where a tile may lie across blocks, one kernel serves all lengths.
        "L": view.block_length if _keeps_to_blocks(view) else 0,
    }


def _planes(store: "BlockStore") -> int:
    """Planes of a word."""
    return 16 // (2 if store.spec.nbits == 3 else store.spec.nbits)


def _words(store: "BlockStore") -> tuple[int, int]:
    """Words of a token that hold planes, and words in all; 1 for a side that is not packed."""
    layout = store.own_layout
    return (layout.plane_words, layout.row_words) if isinstance(layout, WordLayout) else (1, 1)


def _padded_key_words(store: "BlockStore") -> int:
    """Words of a tile of keys: half a head has at least the 16 columns that a matrix product needs."""
    return max(power_of_two(_words(store)[0]), 16 // max(1, _planes(store)))


def _rotation_arguments(
    view: "KVView", tile: int, constants: dict[str, Any], nothing: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Tables of cosines and sines."""
    rotation, device = view.rotation, view.device
    tables = dict.fromkeys(("start_table", "offset_table", "start_angles", "offset_angles"), nothing)
    if rotation is None or not constants["ROTARY"] or not view.num_blocks:
        return tables
    shape = (_planes(view.key_store) // 2, constants["KW"], constants["KWP"])
    tiles = -(-view.num_blocks * view.block_length // tile)
    count = max(64, power_of_two(tiles))
    tables["start_table"] = start_table(rotation, view.num_sinks, tile, count, *shape, device)
    tables["offset_table"] = offset_table(rotation, tile, *shape, device)
    if constants["PROMOTED"]:
        tables["start_angles"] = angle_table(rotation, view.num_sinks, tile, count, device)
        tables["offset_angles"] = offset_angle_table(rotation, tile, device)
    return tables
