"""Calling the compiled kernel: which views it takes, and the arguments it is handed."""

import ctypes
from array import array
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

import torch

from kvquant_hf.ops.cpu.build import load, parallel_region

if TYPE_CHECKING:
    from kvquant_hf.rope import KeyRotation
    from kvquant_hf.view import KVView

# Numbers of query rows that kernels are compiled for; more accumulators than six rows need do not fit in registers.
_ROWS = (1, 2, 3, 4, 6)
_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_BOOLEAN = 3
# A task smaller than this many blocks costs more to hand out and merge than it saves.
_MIN_BLOCKS = 8


def unsupported(view: "KVView") -> str | None:
    """Why the kernel cannot read a view, or `None` if it can."""
    key, value = view.key_store.spec, view.value_store.spec
    if view.device.type != "cpu":
        return f"tensors on {view.device.type}"
    if view.key_dtype != view.value_dtype or view.key_dtype not in _KINDS:
        return f"keys in {view.key_dtype} and values in {view.value_dtype}"
    if (key.is_quantized and key.granularity != "per_channel") or (
        value.is_quantized and value.granularity != "per_token"
    ):
        return f"keys {key.granularity} and values {value.granularity}"
    head_dim, value_dim = view.key_shape[3], view.value_shape[3]
    if head_dim % 16 or value_dim % 16 or max(head_dim, value_dim) > 256:
        return f"head sizes {head_dim} and {value_dim} (multiples of 16 up to 256)"
    if key.is_quantized and key.rotation != "none" and view.rotation is not None:
        return "a Hadamard rotation of pre-RoPE keys"
    if view.block_length % 16:
        return f"blocks of {view.block_length} tokens (multiples of 16)"
    return None


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
    defines: tuple[tuple[str, int], ...]
    alive: tuple[torch.Tensor, ...]
    functions: dict[int, Any]


def decode_attention(query: torch.Tensor, view: "KVView", mask: torch.Tensor | None, scale: float) -> torch.Tensor:
    """Attention over the packed codes in one compiled pass, see `kvquant_hf.ops.decode_attention`.

    Raises:
        BuildError: The kernel could not be compiled.
        ValueError: The kernel cannot read this view, or a gradient is asked for.
    """
    view.check_current()
    plan = view.memo.get("cpu") or _plan(view)
    if query.requires_grad and torch.is_grad_enabled():
        raise ValueError("`backend='cpu'` computes no gradients; use 'auto' or 'torch'.")
    kind = _KINDS.get(query.dtype)
    if kind is None:
        return decode_attention(query.float(), view, mask, scale).to(query.dtype)
    batch_size, num_heads, q_len, _ = query.shape
    steps = query.stride()
    if steps[3] != 1:
        query = query.contiguous()
        steps = query.stride()
    heads = view.key_shape[1]
    group = num_heads // heads
    rows = group * q_len
    chunk = _rows_at_once(rows)
    function = plan.functions.get(chunk)
    if function is None:
        function = plan.functions[chunk] = _function((*plan.defines, ("R", chunk)))
    parallel = parallel_region()
    threads = torch.get_num_threads() if parallel else 1
    tasks = batch_size * heads * -(-rows // chunk)
    blocks = view.num_blocks
    splits = 1 if threads == 1 else max(1, min(-(-2 * threads // tasks), blocks // _MIN_BLOCKS))
    out = torch.empty((batch_size, num_heads, q_len, view.value_shape[3]), dtype=query.dtype)
    # Records of a split: two numbers and a sum in each of up to two bases.
    scratch = torch.empty(tasks * splits * chunk * (2 + 2 * view.value_shape[3])) if splits > 1 else out
    mask_fields, mask_tensor = _mask(view, mask)
    exact_fields = _exact(view)
    args = array(
        "q",
        [query.data_ptr(), steps[0], steps[1], steps[2], kind, out.data_ptr()]
        + plan.blocks
        + mask_fields
        + plan.tables
        + [scratch.data_ptr(), batch_size, heads, group, q_len, blocks, view.num_sinks, splits]
        + exact_fields,
    )
    function(args.buffer_info()[0], scale, threads, parallel)
    del mask_tensor
    return out


@cache
def _rows_at_once(rows: int) -> int:
    """Rows of one pass: the smallest compiled number that needs no more passes than the largest would."""
    share = -(-rows // -(-rows // _ROWS[-1]))
    return next(count for count in _ROWS if count >= share)


def _plan(view: "KVView") -> _Plan:
    reason = unsupported(view)
    if reason is not None:
        raise ValueError(f"`backend='cpu'` does not read {reason}; use 'auto' or 'torch'.")
    key, value, rotation = view.key_store.spec, view.value_store.spec, view.rotation
    blocks = [0] * 16
    tables = [0] * 4
    alive: tuple[torch.Tensor, ...] = ()
    if view.num_blocks:
        blocks = _block_fields(view)
        if rotation is not None:
            starts = _start_tables(rotation, view.num_sinks, view.block_length, -(-view.num_blocks // 64) * 64)
            alive = (*starts, *_offset_tables(rotation, view.block_length))
            tables = [table.data_ptr() for table in alive]
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
        "KH": int(key.is_quantized and key.rotation == "hadamard"),
        "VH": int(value.is_quantized and value.rotation == "hadamard"),
        "KIND": _KINDS[view.key_dtype],
    }
    plan = _Plan(blocks, tables, tuple(defines.items()), alive, {})
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


def _padded(tables: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Tables `[…, pairs]` filled up to whole vectors of sixteen pairs."""
    missing = -tables[0].shape[-1] % 16
    cos, sin = (torch.nn.functional.pad(table, (0, missing)).contiguous() for table in tables)
    return cos, sin


@lru_cache(maxsize=16)
def _offset_tables(rotation: "KeyRotation", block_length: int) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.inference_mode(False):
        cos, sin = rotation.tables(torch.arange(block_length))
        return cos.T.contiguous(), sin.T.contiguous()


@lru_cache(maxsize=8)
def _start_tables(
    rotation: "KeyRotation", first: int, block_length: int, blocks: int
) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.inference_mode(False):
        return _padded(rotation.tables(first + block_length * torch.arange(blocks)))


def _exact(view: "KVView") -> list[int]:
    """Addresses, strides, first columns and lengths of sinks, residual window and sinks of padded rows."""
    window, row_sinks = view.residual, None if view.padding is None else view.row_sinks
    start = 0 if window is None else view.kv_len - window[0].shape[2]
    return _exact_fields(view.sinks, 0) + _exact_fields(window, start) + _exact_fields(row_sinks, view.kv_len)


def _exact_fields(pair: tuple[torch.Tensor, torch.Tensor] | None, first: int) -> list[int]:
    if pair is None:
        return [0] * 10
    keys, values = pair
    return [keys.data_ptr(), values.data_ptr(), *keys.stride()[:3], *values.stride()[:3], first, keys.shape[2]]


def _mask(view: "KVView", mask: torch.Tensor | None) -> tuple[list[int], torch.Tensor | None]:
    """Address, kind and strides of the mask, with the columns of row sinks after those of the slots."""
    if view.padding is not None and view.row_sinks is not None:
        mask = _with_row_sinks(mask, view)
    if mask is None:
        return [0, 0, 0, 0, 0], None
    kind = _BOOLEAN if mask.dtype == torch.bool else _KINDS.get(mask.dtype)
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
