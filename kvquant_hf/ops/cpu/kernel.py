"""Calling the compiled kernel: which views it takes, and the arguments it is handed."""

import ctypes
import math
from functools import cache, lru_cache
from typing import TYPE_CHECKING

import torch

from kvquant_hf.ops.cpu.build import load, parallel_region

if TYPE_CHECKING:
    from kvquant_hf.rope import KeyRotation
    from kvquant_hf.view import KVView

_LOG2E = math.log2(math.e)
# Numbers of query rows that kernels are compiled for; more accumulators than six rows need do not fit in registers.
_ROWS = (1, 2, 3, 4, 6)


class _Exact(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("k", "v")] + [
        (name, ctypes.c_int64) for name in ("kb", "kh", "vb", "vh", "first", "count")
    ]


class _Args(ctypes.Structure):
    _fields_ = (
        [(name, ctypes.c_void_p) for name in ("q", "qb", "kc", "vc", "ks", "kz", "vs", "vz")]
        + [(name, ctypes.c_int64) for name in ("kcb", "kch", "ksb", "ksh", "vcb", "vch", "vsb", "vsh")]
        + [("mask", ctypes.c_void_p)]
        + [(name, ctypes.c_int64) for name in ("mb", "mh", "mq")]
        + [(name, ctypes.c_void_p) for name in ("cosa", "sina", "cosb", "sinb")]
        + [("exact", _Exact * 3)]
        + [(name, ctypes.c_void_p) for name in ("out", "outb", "scratch")]
        + [
            (name, ctypes.c_int64)
            for name in ("batch", "heads", "rows", "q_len", "blocks", "first", "offset", "width", "splits", "wide")
        ]
    )


def unsupported(view: "KVView") -> str | None:
    """Why the kernel cannot read a view, or `None` if it can."""
    key, value = view.key_store, view.value_store
    if view.device.type != "cpu":
        return f"tensors on {view.device.type}"
    if not key.spec.is_quantized or not value.spec.is_quantized:
        return "an unquantized side"
    if key.spec.granularity != "per_channel" or value.spec.granularity != "per_token":
        return f"keys {key.spec.granularity} and values {value.spec.granularity}"
    if key.head_dim % 16 or value.head_dim % 16 or max(key.head_dim, value.head_dim) > 256:
        return f"head sizes {key.head_dim} and {value.head_dim} (multiples of 16 up to 256)"
    if key.spec.rotation != "none" and view.rotation is not None:
        return "a Hadamard rotation of pre-RoPE keys"
    return None


@cache
def _function(defines: tuple[tuple[str, int], ...]) -> "ctypes._CFuncPtr":  # type: ignore[name-defined]
    function = load(defines).kvquant_decode
    function.argtypes = (ctypes.POINTER(_Args), ctypes.c_int, ctypes.c_void_p)
    function.restype = None
    return function


def decode_attention(query: torch.Tensor, view: "KVView", mask: torch.Tensor | None, scale: float) -> torch.Tensor:
    """Attention over the packed codes in one compiled pass, see `kvquant_hf.ops.decode_attention`.

    Raises:
        BuildError: The kernel could not be compiled.
        ValueError: The kernel cannot read this view, or a gradient is asked for.
    """
    reason = unsupported(view)
    if reason is not None:
        raise ValueError(f"`backend='cpu'` does not read {reason}; use 'auto' or 'torch'.")
    if torch.is_grad_enabled() and query.requires_grad:
        raise ValueError("`backend='cpu'` computes no gradients; use 'auto' or 'torch'.")
    view.check_current()
    batch_size, num_heads, q_len, head_dim = query.shape
    heads, value_dim = view.key_shape[1], view.value_shape[3]
    key, value = view.key_store, view.value_store
    rows = num_heads // heads * q_len
    share = -(-rows // -(-rows // _ROWS[-1]))
    chunk = next(count for count in _ROWS if count >= share)
    padded = -(-rows // chunk) * chunk
    states = query.detach().float().reshape(batch_size, heads, rows, head_dim) * (scale * _LOG2E)
    if padded != rows:
        states = torch.nn.functional.pad(states, (0, 0, 0, padded - rows))
    states = states.contiguous()
    folded = view.fold_query(states).contiguous() if key.spec.rotation == "hadamard" else states
    args = _Args(q=states.data_ptr(), qb=folded.data_ptr())
    alive: list[torch.Tensor] = []
    if view.num_blocks:
        _put_blocks(args, view)
        alive += _put_rotation(args, view)
    alive += _put_exact(args, view)
    alive += _put_mask(args, view, mask)
    threads = torch.get_num_threads() if parallel_region() else 1
    tasks = batch_size * heads * (padded // chunk)
    splits = max(1, min(-(-2 * threads // tasks) if threads > 1 else 1, view.num_blocks // 8))
    out = torch.empty(2, batch_size, heads, padded, value_dim)
    scratch = torch.empty(tasks * splits * chunk, 2 + 2 * value_dim)
    args.out, args.outb, args.scratch = out[0].data_ptr(), out[1].data_ptr(), scratch.data_ptr()
    args.batch, args.heads, args.rows, args.q_len = batch_size, heads, padded, q_len
    args.blocks, args.first, args.splits = view.num_blocks, view.num_sinks, splits
    defines = (
        ("KB", key.spec.nbits),
        ("VB", value.spec.nbits),
        ("D", head_dim),
        ("DV", value_dim),
        ("L", view.block_length),
        ("GK", key.spec.group_size),
        ("GV", value.spec.group_size),
        ("R", chunk),
        ("ROPE", 0 if view.rotation is None else 1 if view.rotation.pairing == "half" else 2),
    )
    _function(defines)(ctypes.byref(args), threads, parallel_region())
    del alive
    blocks = view.unfold_output(out[1]) if value.spec.rotation == "hadamard" else out[1]
    output = (out[0] + blocks)[:, :, :rows]
    return output.reshape(batch_size, num_heads, q_len, value_dim).to(query.dtype)


def _put_blocks(args: _Args, view: "KVView") -> None:
    for side, store in (("k", view.key_store), ("v", view.value_store)):
        codes, scale, zero_point = store.codes, store.scale, store.zero_point
        assert codes is not None and scale is not None
        setattr(args, f"{side}c", codes.data_ptr())
        setattr(args, f"{side}s", scale.data_ptr())
        setattr(args, f"{side}z", zero_point.data_ptr() if zero_point is not None else None)
        for name, tensor in (("c", codes), ("s", scale)):
            setattr(args, f"{side}{name}b", tensor.stride(0))
            setattr(args, f"{side}{name}h", tensor.stride(1))
        args.wide |= (side == "k" and scale.dtype == torch.float32) | 2 * (
            side == "v" and scale.dtype == torch.float32
        )


def _put_rotation(args: _Args, view: "KVView") -> list[torch.Tensor]:
    rotation = view.rotation
    if rotation is None:
        return []
    args.offset, args.width = rotation.offset, rotation.rotary_dim
    starts = _start_tables(rotation, view.num_sinks, view.block_length, _rounded_up(view.num_blocks))
    offsets = _offset_tables(rotation, view.block_length)
    args.cosa, args.sina = (t.data_ptr() for t in starts)
    args.cosb, args.sinb = (t.data_ptr() for t in offsets)
    return [*starts, *offsets]


def _rounded_up(blocks: int) -> int:
    return -(-blocks // 64) * 64


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
        return rotation.tables(first + block_length * torch.arange(blocks))


def _put_exact(args: _Args, view: "KVView") -> list[torch.Tensor]:
    window = 0 if view.residual is None else view.residual[0].shape[2]
    parts = [(view.sinks, 0), (view.residual, view.kv_len - window)]
    if view.padding is not None:
        parts.append((view.row_sinks, view.kv_len))
    alive: list[torch.Tensor] = []
    for slot, (pair, first) in enumerate(parts):
        if pair is None or not pair[0].shape[2]:
            continue
        exact = args.exact[slot]
        exact.first, exact.count = first, pair[0].shape[2]
        for side, tensor in zip("kv", pair, strict=True):
            states = tensor.float()
            if states.stride(3) != 1 or states.stride(2) != states.shape[3]:
                states = states.contiguous()
            alive.append(states)
            setattr(exact, side, states.data_ptr())
            setattr(exact, f"{side}b", states.stride(0))
            setattr(exact, f"{side}h", states.stride(1))
    return alive


def _put_mask(args: _Args, view: "KVView", mask: torch.Tensor | None) -> list[torch.Tensor]:
    """The mask in units of log2, with the columns of row sinks after those of the slots."""
    if view.padding is not None and view.row_sinks is not None:
        mask = _with_row_sinks(mask, view)
    if mask is None:
        return []
    if mask.dtype == torch.bool:
        bias = torch.zeros(mask.shape).masked_fill_(~mask, float("-inf"))
    else:
        bias = mask.float() * _LOG2E
    bias = bias.contiguous()
    args.mask = bias.data_ptr()
    args.mb, args.mh, args.mq = (
        0 if size == 1 else step for size, step in zip(bias.shape[:3], bias.stride()[:3], strict=True)
    )
    return [bias]


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
