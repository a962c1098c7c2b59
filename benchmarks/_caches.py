"""Caches of the end-to-end benchmark: making them by name, filling them, and what they weigh."""

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import DynamicCache, PreTrainedModel, StaticCache
from transformers.cache_utils import Cache, DynamicLayer

from kvquant_hf._compat import cache_kwargs
from kvquant_hf.checks import check_choice
from kvquant_hf.eval import BASELINES, baseline_factory

Maker = Callable[[int], Cache]
# Transformers' own quantized caches flush when 128 tokens wait; filled in two pieces, they do so within a few steps.
TAIL = 112
DENSE = ("dynamic", "static")
NAMES = (*DENSE, *BASELINES)


def baseline_maker(name: str, model: PreTrainedModel) -> Maker:
    """Maker of fresh baseline caches, given the most tokens they will hold.

    Args:
        name: `dynamic`, `static`, or one of `kvquant_hf.eval.BASELINES`, optionally with `:nbits`.
        model: The model they serve.

    Raises:
        ValueError: There is no such baseline, or the installed Transformers has none for this model.
        ImportError: Its package is not installed; the message names it.
    """
    if name == "dynamic":
        return lambda length: DynamicCache(config=model.config)
    if name == "static":
        return lambda length: StaticCache(config=model.config, max_cache_len=length)
    check_choice("baseline", name.partition(":")[0], NAMES)
    try:
        make_cache = baseline_factory(name, model.config)
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"`baseline` {name!r} does not exist in transformers {transformers.__version__}: {error}"
        ) from error
    return lambda length: make_cache()


@torch.no_grad()
def feed(model: PreTrainedModel, cache: Cache, ids: torch.Tensor) -> None:
    """Run the model over tokens `[t]`, which continue what the cache holds."""
    model(input_ids=ids[None], use_cache=True, logits_to_keep=1, **cache_kwargs(cache))


def prefill(
    model: PreTrainedModel, cache: Cache, ids: torch.Tensor, chunk: int, progress: Callable[[int], object]
) -> None:
    """Feed tokens `[t]` in pieces of `chunk`, so that activations stay small."""
    for piece in ids.split(chunk):
        feed(model, cache, piece)
        progress(len(piece))


def copy_states(source: DynamicCache, cache: Cache, context: int) -> None:
    """Give a cache the first `context` tokens that a dense one holds, as a prompt and one later piece of it.

    Raises:
        ValueError: The model has layers that do not keep every token.
    """
    layers: list[Any] = list(source.layers)
    for layer in layers:
        if type(layer) is not DynamicLayer:
            raise ValueError(
                f"`fill` must be 'prefill' for a model with layers of class {type(layer).__name__}, got 'copy'."
            )
    first = context - min(TAIL, context // 2)
    for layer_idx, layer in enumerate(layers):
        for part in (slice(0, first), slice(first, context)):
            cache.update(layer.keys[:, :, part], layer.values[:, :, part], layer_idx)


class PeakMemory:
    """Growth of the memory in use, at its highest since `start`.

    On CUDA the bytes of tensors; on Linux the resident memory of the process, which forgets its peak when asked to;
    elsewhere it is not known.

    Args:
        device: Where the tensors are.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._before = 0
        if device.type == "cuda":
            self.method = "growth of torch.cuda.max_memory_allocated"
        elif _can_reset():
            self.method = "growth of the peak resident memory (VmHWM, reset before)"
        else:
            self.method = "not measured: this system does not reset its peak of resident memory"

    def start(self) -> None:
        """Forget what was before."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            self._before = torch.cuda.memory_allocated(self.device)
        elif _can_reset():
            _return_free_memory()
            _CLEAR.write_text("5", encoding="ascii")
            self._before = _status("VmRSS")

    def growth(self) -> int | None:
        """Bytes, or `None` where they are not known."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) - self._before
        return max(0, _status("VmHWM") - self._before) if _can_reset() else None


_CLEAR, _STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")


def _can_reset() -> bool:
    try:
        with _CLEAR.open("w", encoding="ascii"):
            return _STATUS.is_file()
    except OSError:
        return False


def _status(name: str) -> int:
    """Bytes of a line such as `VmRSS:  1234 kB`."""
    lines = _STATUS.read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


def _return_free_memory() -> None:
    """Hand memory that was freed back to the system, else a later cache would seem to grow by less."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
