"""The kernel for blocks in the common layout: which views it takes, and the arguments it is handed."""

from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from kvquant_hf.ops.triton.arguments import common_arguments, power_of_two, row_tile, splits_of
from kvquant_hf.ops.triton.layout import ChannelOrder
from kvquant_hf.ops.triton.tables import angle_table
from kvquant_hf.quantizers.levels import levels_of
from kvquant_hf.quantizers.second_level import scale_table
from kvquant_hf.rotation import head_group, rotate, unrotate

if TYPE_CHECKING:
    from kvquant_hf.spec import QuantSpec
    from kvquant_hf.storage import BlockStore
    from kvquant_hf.view import KVView

MAX_HEAD_DIM = 256
# Matrices that take keys back to the plain basis have to fit beside a tile.
_MAX_BASIS = 128
# Outliers read together: the shortest side that a matrix product takes.
_OUTLIERS = 16
# Fewer block starts than this are never tabled, so that tables are made rarely.
_SHORTEST = 64


def unsupported(view: "KVView") -> str | None:
    """Why the kernel cannot read a view, or `None` if it can."""
    key, value = view.key_store, view.value_store
    if torch.float64 in (view.key_dtype, view.value_dtype):
        return "float64"
    if key.head_dim % 2 or max(key.head_dim, value.head_dim) > MAX_HEAD_DIM:
        return f"head sizes {key.head_dim} and {value.head_dim} (up to {MAX_HEAD_DIM}, of keys even)"
    for name, store in (("keys", key), ("values", value)):
        if store.own_layout is not None:
            return f"{name} packed for another kernel"
        if (reason := _unread_codes(store.spec)) is not None:
            return f"{name} with {reason}"
    if _has_basis(view):
        if key.head_dim > _MAX_BASIS:
            return f"a Hadamard rotation of pre-RoPE keys of head size {key.head_dim} (up to {_MAX_BASIS})"
        if key.spec.outliers:
            return "`outliers` of pre-RoPE keys in a Hadamard basis"
    return None


def _unread_codes(spec: "QuantSpec") -> str | None:
    """What codes are that the kernel cannot make numbers of."""
    if not spec.is_quantized:
        return None
    if spec.method == "turboquant_prod":
        return "`method: turboquant_prod`"
    if spec.shares:
        return "groups that share a parameter (`shared_groups`)"
    if spec.has_second_level and not spec.symmetric:
        return "zero points of 8 bits"
    if spec.outliers and spec.rotation == "grouped_heads":
        return "`outliers` and `rotation: grouped_heads`"
    return None


def _has_basis(view: "KVView") -> bool:
    """Whether a rotation of keys has to be undone before RoPE."""
    spec = view.key_store.spec
    return spec.is_quantized and spec.rotation != "none" and view.rotation is not None


def split_arguments(
    query: torch.Tensor, view: "KVView", mask: torch.Tensor | None, scale: float
) -> tuple[tuple[int, int, int], dict[str, Any]]:
    """Grid and arguments of `planar_split_kernel`, scratch memory included."""
    key, value = view.key_store, view.value_store
    batch_size, heads = view.key_shape[:2]
    length, head_dim, value_dim = view.block_length, key.head_dim, value.head_dim
    tile = 32 if length % 32 == 0 and max(head_dim, value_dim) <= 128 else 16
    tiles = view.num_blocks * -(-length // tile)
    rows = query.shape[1] // heads * query.shape[2]
    row_chunks = -(-rows // row_tile(rows))
    chunk, splits = splits_of(tiles, batch_size * heads * row_chunks, view.device)
    query = query if query.stride(3) == 1 else query.contiguous()
    folded = query
    if key.spec.is_quantized and key.spec.rotation != "none" and not _has_basis(view):
        query = query.float().contiguous()
        folded = rotate(query, *_within_heads(key.spec)).contiguous()
    arguments = common_arguments(query, folded, view, mask, scale, splits)
    nothing = arguments["partial_lse"]
    order = ChannelOrder.of(view.rotation if key.spec.is_quantized else None, head_dim)
    arguments |= {
        **_side_arguments("key", key, heads, nothing),
        **_side_arguments("value", value, heads, nothing),
        **_angle_arguments(view, nothing),
        "key_basis": _basis(*_within_heads(key.spec), head_dim, view.device) if _has_basis(view) else nothing,
        "num_tiles": tiles,
        "chunk": chunk,
        "L": length,
        "D": head_dim,
        "DP": max(16, power_of_two(head_dim)),
        "DH": max(16, power_of_two(head_dim // 2)),
        "ROTARY": order.rotary_dim,
        "OFFSET": order.offset,
        "INTERLEAVED": order.interleaved,
        "BASIS": _has_basis(view),
        "DV": value_dim,
        "DVP": max(16, power_of_two(value_dim)),
        "BN": tile,
        "BND": 16,
        "BO": _OUTLIERS,
    }
    return (splits + 1, heads * row_chunks, batch_size), arguments


def _within_heads(spec: "QuantSpec") -> tuple[str, tuple[int, ...]]:
    """The part of a rotation that acts within heads, and the order of channels."""
    return "hadamard" if spec.rotation == "grouped_heads" else spec.rotation, spec.channel_order


def _side_arguments(side: str, store: "BlockStore", heads: int, nothing: torch.Tensor) -> dict[str, Any]:
    """Tensors of keys or values, and what there is to know about them at compile time."""
    spec, device = store.spec, nothing.device
    parts = ("codes", "scale", "zero_point", "factor", "extra", "promoted", "outlier_index", "outlier_value")
    found: dict[str, Any] = {f"{side}_{name}": _contiguous(getattr(store, name), nothing) for name in parts}
    found[f"{side}_base"] = _contiguous(store.second_level, nothing)
    found[f"{side}_capacity"] = 0 if store.codes is None else store.codes.shape[2]
    is_table = _kind(spec) == "table"
    found[f"{side}_levels"] = levels_of(spec.levels, spec.nbits, device).table if is_table else nothing
    found[f"{side}_scale_levels"] = _scale_levels(spec.levels_name, device) if spec.has_second_level else nothing
    constants: dict[str, Any] = {
        "BITS": spec.nbits,
        "GROUP": spec.group_size,
        "ALONG": spec.granularity == "per_channel",
        "KIND": _kind(spec),
        "MIDDLE": _middle(spec),
        "ZERO_POINT": not spec.symmetric and not spec.centered,
        "FACTOR": spec.has_factor,
        "PROMOTED": spec.num_promoted(store.head_dim),
        "OUTLIERS": spec.num_outliers(store.head_dim * store.block_length) if spec.is_quantized else 0,
        "HEADS": head_group(heads) if spec.is_quantized and spec.rotation == "grouped_heads" else 1,
    }
    return found | {f"{side.upper()}_{name}": constant for name, constant in constants.items()}


def _contiguous(tensor: torch.Tensor | None, nothing: torch.Tensor) -> torch.Tensor:
    """Buffers of a store are contiguous as they are made; what a caller put in their place need not be."""
    return nothing if tensor is None else tensor.contiguous()


def _kind(spec: "QuantSpec") -> str:
    """How codes become numbers, see `planar_codes_kernel.decoded`."""
    if spec.centered:
        return "centered"
    if spec.is_quantized and spec.levels != "uniform":
        return "table"
    return "hybrid" if spec.method == "innerq" and not spec.symmetric else "even"


def _middle(spec: "QuantSpec") -> float:
    """The even level that stands for zero where there is no zero point."""
    if spec.levels != "uniform":
        return 0.0
    return 2.0 ** (spec.nbits - 1) - (1.0 if spec.method == "innerq" else 0.5)


@cache
def _scale_levels(levels_name: str, device: torch.device) -> torch.Tensor:
    """What bytes of scales stand for, relative to the block's base, float32."""
    if levels_name == "uniform":
        return scale_table(device)
    formats = levels_of("e4m3", 8, device)
    with torch.inference_mode(False):
        return formats.table / formats.reach


@cache
def _basis(rotation: str, channel_order: tuple[int, ...], head_dim: int, device: torch.device) -> torch.Tensor:
    """The matrix that undoes a rotation within heads, from the right, `[D, D]`, float32."""
    with torch.inference_mode(False):
        return unrotate(torch.eye(head_dim, device=device), rotation, channel_order).contiguous()


def _angle_arguments(view: "KVView", nothing: torch.Tensor) -> dict[str, torch.Tensor]:
    """Cosines and sines of block starts and of the tokens of a block."""
    if view.rotation is None or not view.num_blocks:
        return {"start_angles": nothing, "offset_angles": nothing}
    length = view.block_length
    count = max(_SHORTEST, power_of_two(view.num_blocks))
    return {
        "start_angles": angle_table(view.rotation, view.num_sinks, length, count, view.device),
        "offset_angles": angle_table(view.rotation, 0, 1, length, view.device),
    }
