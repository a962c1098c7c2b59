"""Calling the compiled kernel: the arguments it is handed."""

import ctypes
import threading
from array import array
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from kvquant_hf.ops.cpu.build import ELEMENT_KINDS, load, parallel_region
from kvquant_hf.ops.cpu.formats import obstacle
from kvquant_hf.ops.cpu.tables import (
    basis,
    level_table,
    mixed_heads,
    offset_columns,
    offset_tables,
    order_table,
    scale_coding,
    sign_table,
    spacing,
    start_tables,
)

if TYPE_CHECKING:
    from kvquant_hf.storage import BlockStore
    from kvquant_hf.view import KVView

# Numbers of query rows that kernels are compiled for; more accumulators than six rows need do not fit in registers.
_ROWS = (1, 2, 3, 4, 6)
_BOOLEAN = 3
# A task smaller than this many blocks costs more to hand out and merge than it saves.
_MIN_BLOCKS = 8


@cache
def _function(defines: tuple[tuple[str, int], ...]) -> Any:
    function = load("decode", defines).kvquant_decode
    function.argtypes = (ctypes.c_void_p, ctypes.c_double, ctypes.c_int, ctypes.c_void_p)
    function.restype = None
    return function


@dataclass(slots=True)
class _Plan:
    """What calls share as long as a layer's blocks stay where they are."""

    blocks: list[int]
    tables: list[int]
    factors: list[int]
    levels: tuple[torch.Tensor | None, torch.Tensor | None]
    channels: tuple[torch.Tensor | None, ...]
    outliers: list[int]
    key_bases: list[int]
    defines: tuple[tuple[str, int], ...]
    calls: dict[tuple[int, ...], "_Call"]


@dataclass(slots=True, eq=False)
class _Call:
    """Arguments of the kernel for one kind of query; what differs from step to step is written over."""

    function: Any
    args: "array[int]"
    address: int
    steps: tuple[int, ...]
    scratch: int
    sinks: object = None
    row_sinks: object = None
    keys: torch.Tensor | None = None
    masked: bool = False


# Places in the arguments, see `Args` in decode.cpp.
_QUERY, _OUT, _MASK, _SCRATCH, _WINDOW = 0, 5, 22, 31, 49
_WINDOW_FIRST = _WINDOW + 8


def decode_attention(query: torch.Tensor, view: "KVView", mask: torch.Tensor | None, scale: float) -> torch.Tensor:
    """Attention over the packed codes in one compiled pass, see `kvquant_hf.ops.decode_attention`.

    Raises:
        BuildError: The kernel could not be compiled.
        ValueError: The kernel cannot read this view, or a gradient is asked for.
    """
    view.check_current()
    memo = view.key_store.memo
    plan: _Plan = memo["cpu"] if "cpu" in memo else _plan(view)
    if query.requires_grad and torch.is_grad_enabled():
        raise ValueError("`backend='cpu'` computes no gradients; use 'auto' or 'torch'.")
    kind = ELEMENT_KINDS.get(query.dtype)
    if kind is None:
        return decode_attention(query.float(), view, mask, scale).to(query.dtype)
    steps = query.stride()
    if steps[3] != 1:
        query = query.contiguous()
        steps = query.stride()
    batch_size, num_heads, q_len, _ = query.shape
    parallel = parallel_region()
    threads = torch.get_num_threads() if parallel else 1
    kind_of_call = (num_heads, q_len, kind, threads)
    call = plan.calls.get(kind_of_call)
    if call is None:
        call = plan.calls[kind_of_call] = _new_call(plan, view, *kind_of_call)
    out = torch.empty((batch_size, num_heads, q_len, view.value_shape[3]), dtype=query.dtype)
    args = call.args
    args[_QUERY] = query.data_ptr()
    args[_OUT] = out.data_ptr()
    if steps != call.steps:
        args[_QUERY + 1], args[_QUERY + 2], args[_QUERY + 3], _ = call.steps = steps
    _put_exact(call, view)
    if mask is not None or call.masked or view.padding is not None:
        fields, mask = _mask(view, mask)
        args[_MASK : _MASK + 5] = array("q", fields)
        call.masked = mask is not None
    if call.scratch:
        args[_SCRATCH] = _workspace(call.scratch).data_ptr()
    call.function(call.address, scale, threads, parallel)
    return out


_own = threading.local()


def _workspace(size: int) -> torch.Tensor:
    """Room for `size` numbers that calls of this thread share."""
    kept: torch.Tensor | None = getattr(_own, "kept", None)
    if kept is None or kept.numel() < size:
        with torch.inference_mode(False):
            kept = _own.kept = torch.empty(size)
    return kept


def _new_call(plan: _Plan, view: "KVView", num_heads: int, q_len: int, kind: int, threads: int) -> _Call:
    batch_size, heads, value_dim = view.key_shape[0], view.key_shape[1], view.value_shape[3]
    rows = num_heads // heads * q_len
    chunk = _rows_at_once(rows)
    tasks = batch_size * heads * -(-rows // chunk)
    splits = 1 if threads == 1 else max(1, min(-(-2 * threads // tasks), view.num_blocks // _MIN_BLOCKS))
    # Records of a split: two numbers, and a sum in each of up to two bases.
    scratch = tasks * splits * chunk * (2 + 2 * value_dim) if splits > 1 else 0
    args = array(
        "q",
        [0, -1, -1, -1, kind, 0]
        + plan.blocks
        + [0] * 5
        + plan.tables
        + [0, batch_size, heads, num_heads // heads, q_len, view.num_blocks, view.num_sinks, splits]
        + [0] * 30
        + plan.factors
        + [0 if table is None else table.data_ptr() for table in plan.levels]
        + plan.outliers
        + plan.key_bases
        + [0 if table is None else table.data_ptr() for table in plan.channels],
    )
    function = _function((*plan.defines, ("R", chunk)))
    return _Call(function, args, args.buffer_info()[0], (), scratch)


@cache
def _rows_at_once(rows: int) -> int:
    """Rows of one pass: the smallest compiled number that needs no more passes than the largest would."""
    share = -(-rows // -(-rows // _ROWS[-1]))
    return next(count for count in _ROWS if count >= share)


def _plan(view: "KVView") -> _Plan:
    reason = obstacle(view)
    if reason is not None:
        raise ValueError(f"`backend='cpu'` does not read {reason}; use 'auto' or 'torch'.")
    key, value, rotation = view.key_store.spec, view.value_store.spec, view.rotation
    blocks = [0] * 16
    tables = [0] * 4
    factors = [0] * 18
    if view.num_blocks:
        blocks, factors = _block_fields(view), _factor_fields(view)
        if rotation is not None:
            starts = start_tables(rotation, view.num_sinks, view.block_length, view.num_blocks)
            by_token = key.granularity == "per_token" or (key.is_quantized and key.rotation != "none")
            offsets = offset_tables if by_token else offset_columns
            tables = [table.data_ptr() for table in (*starts, *offsets(rotation, view.block_length))]
    defines = {
        "KB": key.nbits,
        "VB": value.nbits,
        "D": view.key_shape[3],
        "DV": view.value_shape[3],
        "L": view.block_length,
        "GK": key.group_size if key.is_quantized else view.block_length,
        "GV": value.group_size,
        "ROPE": 0 if rotation is None else 1 if rotation.pairing == "half" else 2,
        "RO": 0 if rotation is None else rotation.offset,
        "RW": 0 if rotation is None else rotation.rotary_dim,
        "KH": basis(key),
        "VH": basis(value),
        "KG": mixed_heads(key, view.key_shape[1]),
        "VG": mixed_heads(value, view.value_shape[1]),
        "KP": key.num_promoted(view.key_shape[3]) if key.is_quantized else 0,
        "KF": int(key.has_factor),
        "VF": int(value.has_factor),
        "KM": scale_coding(key),
        "VM": scale_coding(value),
        "KT": spacing(key),
        "VT": spacing(value),
        "KX": int(key.is_quantized and key.granularity == "per_token"),
        "VX": int(value.is_quantized and value.granularity == "per_channel"),
        "KO": key.num_outliers(view.key_shape[3] * view.block_length),
        "VO": value.num_outliers(view.value_shape[3] * view.block_length),
        "KIND": ELEMENT_KINDS[view.key_dtype],
    }
    levels = level_table(key), level_table(value)
    signs = sign_table(key, view.key_shape[3]), sign_table(value, view.value_shape[3])
    channels = *signs, order_table(key), order_table(value)
    others = _outlier_fields(view), _base_fields(view.key_store)
    plan = _Plan(blocks, tables, factors, levels, channels, *others, tuple(defines.items()), {})
    view.memo["cpu"] = plan
    return plan


def _block_fields(view: "KVView") -> list[int]:
    """Addresses and strides of codes, scales and zero points, as `Args` in decode.cpp lists them."""
    pointers: list[int] = []
    strides: list[int] = []
    wide: list[int] = []
    for store in (view.key_store, view.value_store):
        codes, scale, zero_point = store.codes, store.scale, store.zero_point
        assert codes is not None
        pointers += [codes.data_ptr()] + [0 if tensor is None else tensor.data_ptr() for tensor in (scale, zero_point)]
        strides += [codes.stride(0), codes.stride(1)]
        strides += [0, 0] if scale is None else [scale.stride(0), scale.stride(1)]
        wide.append(int(scale is not None and scale.dtype == torch.float32))
    return pointers + strides + wide


def _factor_fields(view: "KVView") -> list[int]:
    """Addresses and strides of factors, of what promoted channels add and of bases of values.

    Zeros where there are none, likewise.
    """
    factors = [store.factor for store in (view.key_store, view.value_store)]
    fields = [0 if factor is None else factor.data_ptr() for factor in factors]
    for factor in factors:
        fields += [0, 0] if factor is None else factor.stride()[:2]
    fields += [int(factor is not None and factor.dtype == torch.float32) for factor in factors]
    promotion = [view.key_store.extra, view.key_store.promoted]
    fields += [0 if tensor is None else tensor.data_ptr() for tensor in promotion]
    for tensor in promotion:
        fields += [0, 0] if tensor is None else tensor.stride()[:2]
    return fields + _base_fields(view.value_store)


def _base_fields(store: "BlockStore") -> list[int]:
    """Address, strides and width of what bytes of scales are relative to; zeros where there are none."""
    base = store.second_level
    return [0] * 4 if base is None else [base.data_ptr(), *base.stride()[:2], int(base.dtype == torch.float32)]


def _outlier_fields(view: "KVView") -> list[int]:
    """Addresses, strides and widths of outliers of keys and of values, see `Sparse` in decode.cpp; zeros for none."""
    fields: list[int] = []
    for store in (view.key_store, view.value_store):
        places, exact = store.outlier_index, store.outlier_value
        if places is None or exact is None:
            fields += [0] * 8
            continue
        fields += [places.data_ptr(), exact.data_ptr(), *places.stride()[:2], *exact.stride()[:2]]
        fields += [int(places.dtype == torch.int32), int(exact.dtype == torch.float32)]
    return fields


def _put_exact(call: _Call, view: "KVView") -> None:
    """Write addresses, strides, first columns and lengths of sinks, residual window and sinks of padded rows."""
    args = call.args
    if view.sinks is not call.sinks:
        call.sinks = view.sinks
        args[_WINDOW - 10 : _WINDOW] = _tokens(view.sinks, 0)
        args[_WINDOW - 12] = view.num_sinks
    row_sinks = None if view.padding is None else view.row_sinks
    if row_sinks is not call.row_sinks or row_sinks is not None:
        call.row_sinks = row_sinks
        args[_WINDOW + 10 : _WINDOW + 20] = _tokens(row_sinks, view.kv_len)
    length = view.window_length
    keys = view.windows[0].buffer
    if keys is not call.keys:
        values = view.windows[1].buffer
        call.keys = keys
        args[_WINDOW : _WINDOW + 10] = _tokens(None if keys is None or values is None else (keys, values), 0)
    args[_WINDOW_FIRST] = view.kv_len - length
    args[_WINDOW_FIRST + 1] = length


def _tokens(pair: tuple[torch.Tensor, torch.Tensor] | None, first: int) -> "array[int]":
    if pair is None:
        return array("q", [0] * 10)
    keys, values = pair
    strides = [*keys.stride()[:3], *values.stride()[:3]]
    return array("q", [keys.data_ptr(), values.data_ptr(), *strides, first, keys.shape[2]])


def _mask(view: "KVView", mask: torch.Tensor | None) -> tuple[list[int], torch.Tensor | None]:
    """Address, kind and strides of the mask, with the columns of row sinks after those of the slots."""
    if view.padding is not None and view.row_sinks is not None:
        mask = _with_row_sinks(mask, view)
    if mask is None:
        return [0, 0, 0, 0, 0], None
    kind = _BOOLEAN if mask.dtype == torch.bool else ELEMENT_KINDS.get(mask.dtype)
    if kind is None:
        mask, kind = mask.float(), 0
    if mask.stride(3) != 1:
        mask = mask.contiguous()
    steps = [0 if size == 1 else step for size, step in zip(mask.shape[:3], mask.stride(), strict=False)]
    return [mask.data_ptr(), kind, *steps], mask


def _with_row_sinks(mask: torch.Tensor | None, view: "KVView") -> torch.Tensor:
    """A mask over `T + S` columns: sinks of padded rows move from their slots among the blocks to the end."""
    assert view.padding is not None and view.row_sinks is not None
    batch_size, kv_len = view.key_shape[0], view.kv_len
    if mask is None:
        mask = torch.ones(1, 1, 1, kv_len, dtype=torch.bool)
    shut = False if mask.dtype == torch.bool else float("-inf")
    mask = mask.expand(batch_size, *mask.shape[1:])
    end_of_blocks = view.num_sinks + view.num_blocks * view.block_length
    slots = view.padding[:, None] + torch.arange(view.row_sinks[0].shape[2])
    # Only slots within the blocks are replaced; elsewhere the tokens are exact already.
    moved = (view.padding[:, None] > 0) & (slots >= view.num_sinks) & (slots < end_of_blocks)
    index = slots.clamp(max=kv_len - 1)[:, None, None, :].expand(*mask.shape[:3], -1)
    shown = torch.where(moved[:, None, None, :], mask.gather(3, index), shut)
    hidden = ((torch.arange(kv_len)[:, None] == slots[:, None, :]) & moved[:, None, :]).any(-1)
    return torch.cat([torch.where(hidden[:, None, None, :], shut, mask), shown], dim=3)
