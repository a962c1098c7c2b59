"""Calling the decode kernels: which views they take, and the arguments they are handed."""

import contextlib
import math
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from kvquant_hf.ops.triton.arguments import block_arguments, mask_arguments, promotion_arguments, strides
from kvquant_hf.ops.triton.availability import why_unavailable
from kvquant_hf.ops.triton.layout import WordLayout, reads_rotation, unread_codes
from kvquant_hf.ops.triton.tables import angle_table, offset_angle_table, offset_table, start_table
from kvquant_hf.ops.triton.tuning import Launch, launch_parameters
from kvquant_hf.rotation import hadamard_width

if TYPE_CHECKING:
    from kvquant_hf.storage import BlockStore
    from kvquant_hf.view import KVView

_LOG2E = math.log2(math.e)
# Programs per multiprocessor that are aimed at: two are resident at once by their registers.
_WAVES = 2
MAX_HEAD_DIM = 256


def unsupported(view: "KVView") -> str | None:
    """Why the kernels cannot read a view, or `None` if they can."""
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
            if store.has_left_own_layout:
                return "keys or values too large for float16 arithmetic"
            return "blocks packed for another backend"
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


@cache
def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 2


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
    from kvquant_hf.ops.triton.combine_kernel import combine_kernel
    from kvquant_hf.ops.triton.decode_kernel import decode_split_kernel

    if launch is None:
        widths = min(view.key_store.spec.nbits, view.value_store.spec.nbits)
        launch = launch_parameters(max(query.shape[3], view.value_shape[3]), widths, _arch(view.device))
    grid, arguments = split_arguments(query, view, mask, scale, launch)
    decode_split_kernel[grid](**arguments, **launch_options(launch))
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
    batch_size, num_heads, q_len, _ = query.shape
    heads, value_dim = view.key_shape[1], view.value_shape[3]
    key, value = view.key_store, view.value_store
    if _keeps_to_blocks(view):
        launch = replace(launch, BN=min(launch.BN, view.block_length))
    rows = num_heads // heads * q_len
    row_tile = 8 if rows <= 8 else 16
    programs = batch_size * heads * -(-rows // row_tile)
    tokens = view.num_blocks * view.block_length
    chunk, splits = _splits(tokens, launch.BN, programs, view.device)
    query = query if query.stride(3) == 1 else query.contiguous()
    folded = query
    if key.spec.is_quantized and key.spec.rotation != "none":
        query = query.float().contiguous()
        folded = view.fold_query(query).contiguous()
    partial = torch.empty(batch_size, heads, rows, splits + 1, value_dim, device=view.device)
    partial_lse = torch.empty(batch_size, heads, rows, splits + 1, device=view.device)
    nothing = partial_lse  # stands in for what is not there; never read
    constants = _constants(view)
    window = 0 if view.residual is None else view.residual[0].shape[2]
    arguments: dict[str, Any] = {
        "query": folded,
        "exact_query": query,
        "partial": partial,
        "partial_lse": partial_lse,
        "scale": scale * _LOG2E,
        "num_tokens": tokens,
        "num_sinks": view.num_sinks,
        "window": window,
        "window_slot": view.kv_len - window,
        "num_row_sinks": 0 if view.row_sinks is None else view.row_sinks[0].shape[2],
        "chunk": chunk,
        "num_splits": splits,
        "rows": rows,
        "query_length": q_len,
        "group_heads": num_heads // heads,
        "padding": nothing if view.padding is None else view.padding,
        **strides("query", folded, "bht"),
        **block_arguments("key", key, nothing),
        **block_arguments("value", value, nothing),
        **promotion_arguments(key, nothing),
        **_rotation_arguments(view, launch.BN, constants, nothing),
        **mask_arguments(mask, nothing),
        **constants,
        "GP": row_tile,
        "BN": launch.BN,
        "BND": launch.BND,
        "STAGES": launch.num_stages,
        "PADDED": view.padding is not None and view.row_sinks is not None,
        "ASM": uses_ptx(),
        "PRECISION": "tf32",
    }
    for name, pair in (("sink", view.sinks), ("window", view.residual), ("row_sink", view.row_sinks)):
        for side, tensor in zip(("keys", "values"), pair or (None, None), strict=True):
            arguments[f"{name}_{side}"] = nothing if tensor is None else tensor
            if name != "row_sink":
                arguments |= strides(f"{name}_{side}", tensor, "bh")
    return (splits + 1, heads * -(-rows // row_tile), batch_size), arguments


def combine_arguments(
    partial: torch.Tensor, partial_lse: torch.Tensor, output: torch.Tensor, view: "KVView"
) -> dict[str, Any]:
    """Arguments of `combine_kernel`."""
    spec, value_dim = view.value_store.spec, output.shape[3]
    width = hadamard_width(value_dim) if spec.is_quantized and spec.rotation == "hadamard" else 0
    return {
        "partial": partial,
        "partial_lse": partial_lse,
        "output": output,
        "num_splits": partial.shape[3] - 1,
        "rows": partial.shape[2],
        "query_length": output.shape[2],
        "group_heads": output.shape[1] // partial.shape[1],
        "DV": value_dim,
        "DVP": _power_of_two(value_dim),
        "BS": 16,
        "WIDTH": width,
        "ROOT": math.sqrt(width),
    }


def _keeps_to_blocks(view: "KVView") -> bool:
    """Whether a tile lies within one block, whose factors, base or promoted channels are its own."""
    value = view.value_store.spec
    return value.has_factor or value.has_second_level or view.key_store.spec.promotes


def _power_of_two(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()


def _splits(tokens: int, tile: int, programs: int, device: torch.device) -> tuple[int, int]:
    """Tokens of a split, a multiple of `tile`, and the number of splits."""
    tiles = -(-tokens // tile)
    wanted = max(1, -(-_WAVES * _multiprocessors(device) // programs))
    chunk = max(1, -(-tiles // wanted)) * tile
    return chunk, -(-tokens // chunk)


def _constants(view: "KVView") -> dict[str, Any]:
    """Compile-time arguments of both sides."""
    key, value = view.key_store, view.value_store
    order = key.own_layout.order if isinstance(key.own_layout, WordLayout) else None
    rotary = 0 if order is None or view.rotation is None else order.rotary_dim
    key_words, key_row = _words(key)
    value_words, value_row = _words(value)
    value_padded = _power_of_two(value_words)
    packed_value_columns = 2 * value_padded * _planes(value)
    return {
        "D": key.head_dim,
        "DP": max(16, _power_of_two(key.head_dim)),
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
        "DVP": packed_value_columns if value.spec.is_quantized else max(16, _power_of_two(value.head_dim)),
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
        "PP": max(16, _power_of_two(key.spec.num_promoted(key.head_dim))),
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
    return max(_power_of_two(_words(store)[0]), 16 // max(1, _planes(store)))


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
    count = max(64, _power_of_two(tiles))
    tables["start_table"] = start_table(rotation, view.num_sinks, tile, count, *shape, device)
    tables["offset_table"] = offset_table(rotation, tile, *shape, device)
    if constants["PROMOTED"]:
        tables["start_angles"] = angle_table(rotation, view.num_sinks, tile, count, device)
        tables["offset_angles"] = offset_angle_table(rotation, tile, device)
    return tables
