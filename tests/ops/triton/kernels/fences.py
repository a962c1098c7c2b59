"""Buffers with poison around and between their rows: what a kernel must neither read nor write."""

import dataclasses
from collections.abc import Callable

import torch

from kvquant_hf.blocks import PARTS
from kvquant_hf.window import ExactTokens

# Elements of poison before and after; a multiple of 16 bytes, so that alignment stays what it is.
MARGIN = 256


class Fences:
    """Hands out copies of tensors inside poisoned memory and looks afterwards whether the poison is intact."""

    def __init__(self) -> None:
        self._buffers: list[tuple[torch.Tensor, torch.Tensor]] = []

    def _poisoned(self, size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        kind = torch.iinfo if not dtype.is_floating_point else None
        if dtype.is_floating_point:
            return torch.full((size,), float("nan"), dtype=dtype, device=device)
        value = -1 if kind is not None and torch.iinfo(dtype).min < 0 else 0xFF
        return torch.full((size,), value, dtype=dtype, device=device)

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy with the same strides, poison in every gap."""
        extent = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
        is_bool = tensor.dtype == torch.bool
        dtype = torch.uint8 if is_bool else tensor.dtype
        buffer = self._poisoned(extent + 2 * MARGIN, dtype, tensor.device)
        inside = buffer.as_strided(tensor.shape, tensor.stride(), MARGIN)
        inside.copy_(tensor)
        self._buffers.append((buffer, buffer.clone()))
        return inside.view(torch.bool) if is_bool else inside

    def empty(self, *shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Fresh memory that a kernel may fill, and nothing beyond it."""
        size = torch.Size(shape).numel()
        buffer = self._poisoned(size + 2 * MARGIN, dtype, device)
        margins = torch.cat([buffer[:MARGIN], buffer[-MARGIN:]])
        self._buffers.append((buffer, margins.clone()))
        return buffer[MARGIN : MARGIN + size].view(shape)

    def check(self) -> None:
        """Raise where a fenced copy or a margin has changed."""
        for buffer, before in self._buffers:
            now = buffer if buffer.shape == before.shape else torch.cat([buffer[:MARGIN], buffer[-MARGIN:]])
            assert torch.equal(_bytes(now), _bytes(before)), "a kernel wrote where it must not"


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def fence_view(view, fences: Fences):
    """The view with every tensor in poisoned memory and its unused block capacity poisoned."""
    for store in (view.key_store, view.value_store):
        for name in PARTS:
            tensor = getattr(store, name)
            if tensor is not None:
                tensor = tensor.clone()
                tail = tensor[:, :, store.num_blocks :]
                tail.fill_(float("nan") if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max)
                setattr(store, name, fences.copy(tensor))
    changes = {}
    if view.residual is not None:
        windows = []
        for tensor in view.residual:
            window = ExactTokens()
            window.buffer, window.length = fences.copy(tensor), view.window_length
            windows.append(window)
        changes["windows"] = tuple(windows)
    for name in ("sinks", "row_sinks"):
        pair = getattr(view, name)
        if pair is not None:
            changes[name] = tuple(fences.copy(tensor) for tensor in pair)
    if view.padding is not None:
        changes["padding"] = fences.copy(view.padding)
    return dataclasses.replace(view, **changes)


def fenced_empty(fences: Fences) -> Callable[..., torch.Tensor]:
    """Stands in for `torch.empty` in the launcher."""

    def empty(*shape: int, dtype: torch.dtype = torch.float32, device: torch.device) -> torch.Tensor:
        return fences.empty(*shape, dtype=dtype, device=device)

    return empty
