"""Runs a model's own code without its weights, to see what it hands to a cache.

A `ModelShell` is a decoder built from a config with its weights on the meta device, where they take no memory. Running
it replaces every product with a weight by a fixed vector, the same at every position, so each layer hands the cache
one key that depends on the position only through what the model adds to it: its rotation. The cost does not grow with
the width of the model.
"""

import copy
import inspect
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from transformers import DynamicCache, PreTrainedConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_CACHE_ARGUMENTS = ("cache", "past_key_values", "past_key_value")
_NUM_CONSTANTS = 1 << 17
_TABLE_ELEMENTS = 1 << 18  # a larger tensor of constants is a weight, not a table
_MANY_ELEMENTS = 1 << 20  # operands that keys of a few tokens do not reach


@dataclass
class ShellRun:
    """What one run of a shell showed.

    Attributes:
        positions: Positions of the `P` tokens.
        keys: Keys of the first head by layer, `[P, head_dim]`, float32; only layers that handed keys to the cache.
        values: Likewise the second tensor handed to the cache.
        num_heads: Key/value heads by layer.
        head_dims: Size of a key and of a value vector, by layer.
        tables: The distinct `inv_freq` buffers of the model at the end of the run, each one-dimensional, float32.
        scalings: What each layer's attention multiplies products of queries and keys by.
        error: What stopped the run before its end, or `None`.
    """

    positions: tuple[int, ...]
    keys: dict[int, torch.Tensor] = field(default_factory=dict)
    values: dict[int, torch.Tensor] = field(default_factory=dict)
    num_heads: dict[int, int] = field(default_factory=dict)
    head_dims: dict[int, tuple[int, int]] = field(default_factory=dict)
    tables: list[torch.Tensor] = field(default_factory=list)
    scalings: dict[int, float] = field(default_factory=dict)
    error: Exception | None = None


class ModelShell:
    """A decoder of a config's own class whose weights hold no memory.

    Args:
        config: Text decoder config; a copy is used.
        model_class: Class to instantiate.

    Raises:
        Exception: Whatever the model's own code raises.
    """

    def __init__(self, config: PreTrainedConfig, model_class: "type[PreTrainedModel]") -> None:
        self._config = copy.deepcopy(config)
        self._config._attn_implementation = "eager"
        self._config._experts_implementation = "eager"
        self._constants = _Constants()
        with isolated(), _WeightsOnMeta():
            self._model = model_class(self._config).eval()
        # Weights of norms are random, so that keys scaled per channel after their rotation are not taken for rotated.
        for module in self._model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                if parameter.ndim <= 1:
                    weight = self._constants.take(parameter.numel()).abs().reshape(parameter.shape)
                    setattr(module, name, nn.Parameter(weight, requires_grad=False))

    def run(self, positions: Sequence[int], layers: Collection[int] | None = None) -> ShellRun:
        """Feed one constant token at the given positions, or at `0, 1, …` where the model takes no positions.

        Args:
            positions: Positions in ascending order.
            layers: Stop when these layers were recorded; all layers otherwise.

        Returns:
            What was recorded; an error of the model's code is recorded too.

        Raises:
            TypeError: The model takes no cache.
        """
        run = ShellRun(tuple(positions))
        parameters = inspect.signature(self._model.forward).parameters
        cache_argument = next((name for name in _CACHE_ARGUMENTS if name in parameters), None)
        if cache_argument is None:
            raise TypeError(f"{type(self._model).__name__}.forward takes none of {_CACHE_ARGUMENTS}")
        with isolated(), _ConstantProducts(self._constants, run):
            try:
                arguments: dict[str, Any] = {
                    "input_ids": torch.ones(1, len(positions), dtype=torch.long),
                    "position_ids": torch.tensor([list(positions)]),
                    "use_cache": True,
                }
                arguments = {name: value for name, value in arguments.items() if name in parameters}
                self._model(**arguments, **{cache_argument: _Recorder(self._config, run, layers)})
            except _AllRecorded:
                pass
            # Code of an arbitrary model may raise anything; what it did before that stays usable.
            except Exception as error:
                run.error = error
        for name, buffer in self._model.named_buffers():
            if name.endswith("inv_freq") and buffer.ndim == 1 and not buffer.is_meta:
                table = buffer.detach().float().clone()
                if not any(torch.equal(table, other) for other in run.tables):
                    run.tables.append(table)
        return run


def decoder_class(config: PreTrainedConfig, model: object = None) -> "type[PreTrainedModel]":
    """The class of the decoder that a text config describes: without a language modeling head where there is one.

    Args:
        config: Text decoder config.
        model: A model that contains the decoder, for classes that are not registered with Transformers.

    Raises:
        LookupError: The class is neither in the model nor registered.
    """
    # Modeling code takes seconds to import, and is there already when there is a model.
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING, PreTrainedModel

    if isinstance(model, nn.Module):
        classes = [type(m) for m in model.modules() if isinstance(m, PreTrainedModel) and m.config is config]
        if classes:
            return next((body for body in classes if not body.can_generate()), classes[0])
    for mapping in (MODEL_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING):
        if type(config) in mapping:
            registered: Any = mapping[type(config)]
            found: type[PreTrainedModel] = registered[0] if isinstance(registered, tuple) else registered
            return found
    raise LookupError(f"no model class is registered for {type(config).__name__}, pass the model")


class _AllRecorded(Exception):
    """Ends a run early."""


class _Recorder(DynamicCache):
    """A cache that keeps nothing but each layer's first keys and values, in a `ShellRun`."""

    def __init__(self, config: PreTrainedConfig, run: ShellRun, layers: Collection[int] | None) -> None:
        super().__init__(config=config)
        self._run = run
        self._layers = layers

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Record `[B, H, P, D]` of the first row and head, and return what came."""
        if layer_idx not in self._run.keys:
            self._run.keys[layer_idx] = _first_head(key_states)
            self._run.values[layer_idx] = _first_head(value_states)
            if key_states.ndim == 4:
                self._run.num_heads[layer_idx] = key_states.shape[1]
                self._run.head_dims[layer_idx] = key_states.shape[-1], value_states.shape[-1]
        if self._layers is not None and self._run.keys.keys() >= set(self._layers):
            raise _AllRecorded
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Always zero: nothing is kept."""
        return 0


def _first_head(states: torch.Tensor) -> torch.Tensor:
    return (states[0, 0] if states.ndim == 4 else states).detach().float().clone()


@contextmanager
def isolated() -> Iterator[None]:
    """Keeps the caller's device, grad and autocast modes out, and what is drawn inside out of its random state."""
    elsewhere = torch.get_default_device().type != "cpu"
    with (
        torch.random.fork_rng(devices=[]),
        torch.inference_mode(False),
        torch.no_grad(),
        torch.autocast("cpu", enabled=False),
        torch.device("cpu") if elsewhere else nullcontext(),
    ):
        yield


class _Constants:
    """Fixed random vectors without zeros, cut from one table, so that a large model costs no more than a small one."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        magnitudes = torch.rand(_NUM_CONSTANTS, generator=generator, device="cpu", dtype=torch.float32) + 0.5
        signs = torch.randint(0, 2, (_NUM_CONSTANTS,), generator=generator, device="cpu") * 2 - 1
        self._table = magnitudes * signs
        self._start = 0

    def take(self, size: int) -> torch.Tensor:
        """A vector `[size]`, float32, that differs from call to call."""
        self._start = (self._start + 7919) % (_NUM_CONSTANTS // 2)
        if size > _NUM_CONSTANTS // 2:
            return self._table.repeat(size // _NUM_CONSTANTS + 1)[:size]
        return self._table[self._start : self._start + size]


class _WeightsOnMeta(TorchFunctionMode):
    """Makes uninitialised tensors on the meta device, and large random and constant ones; tables stay real.

    Weights are not filled at random either, which takes time even on the meta device.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if getattr(func, "__name__", "") in _RANDOM_FILLS:
            return args[0] if args else kwargs["tensor"]
        if func is torch.empty:
            return func(*args, **{**kwargs, "device": "meta"})
        if func in (torch.zeros, torch.ones, torch.full, torch.rand, torch.randn):
            shape_only = func(*args, **{**kwargs, "device": "meta"})
            if shape_only.numel() > _TABLE_ELEMENTS:
                return shape_only
        return func(*args, **kwargs)


class _ConstantProducts(TorchFunctionMode):
    """Replaces each product with a weight by a vector that is the same in every row.

    Where a weight enters any other operation (a bias of an expert that is added), constants take its place.
    Operations on many elements (the state of a linear attention layer) go to the meta device: keys of a few tokens are
    never that large, and of the rest only the shape matters.

    The first product after a layer has handed its keys to the cache is that of queries and keys; by what numbers it is
    multiplied before the softmax is noted.
    """

    def __init__(self, constants: _Constants, run: ShellRun) -> None:
        super().__init__()
        self._constants = constants
        self._run = run
        self._scores: torch.Tensor | None = None

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _PRODUCTS:
            rows_at, weight_at, weight_dim = _PRODUCTS[func]
            operands = [*args, *(kwargs[name] for name in _OPERANDS if name in kwargs)]
            rows, weight = operands[rows_at], operands[weight_at]
            if weight.is_meta or isinstance(weight, nn.Parameter):
                leading = rows.shape if func is F.embedding else rows.shape[:-1]
                size = weight.shape[weight_dim]
                return self._constants.take(size).expand(*leading, size).contiguous()
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        change = _on_meta
        if _elements(func, tensors, args, kwargs) <= _MANY_ELEMENTS:
            try:
                result = func(*args, **kwargs)
            except (RuntimeError, NotImplementedError):  # how torch refuses mixed devices, and reading meta tensors
                if sum(tensor.numel() for tensor in tensors) <= _MANY_ELEMENTS or all(t.is_meta for t in tensors):
                    change = self._constant_like
                if func is torch.Tensor.view:
                    func = torch.Tensor.reshape  # constants and meta tensors may have other strides than real results
            else:
                self._note_scaling(func, args, result)
                return result
        return func(*_changed(args, change), **dict(zip(kwargs, _changed(kwargs.values(), change), strict=True)))

    def _note_scaling(self, func: Callable[..., Any], args: tuple[Any, ...], result: Any) -> None:
        scalings = self._run.scalings
        if func in _MATMULS and self._run.keys:
            layer_idx = next(reversed(self._run.keys))
            if layer_idx not in scalings:
                scalings[layer_idx] = 1.0
                self._scores = result
        elif isinstance(result, torch.Tensor) and args and args[0] is self._scores:
            factor = args[1] if func in _SCALINGS and len(args) > 1 else 1.0
            if not isinstance(factor, torch.Tensor) or (factor.numel() == 1 and not factor.is_meta):
                scalings[next(reversed(scalings))] *= float(factor) ** _SCALINGS.get(func, 1)
            self._scores = None if "softmax" in getattr(func, "__name__", "") else result

    def _constant_like(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_meta:
            return tensor
        if not tensor.is_floating_point():
            return torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)
        return self._constants.take(tensor.shape[-1] if tensor.ndim else 1).expand(tensor.shape)


def _elements(
    func: Callable[..., Any], tensors: Sequence[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> int:
    """Elements of real tensors that a call reads, or those it makes where these may be far more."""
    if func in _MULTIPLICATIONS and len(tensors) == 2:
        return math.prod(torch.broadcast_shapes(tensors[0].shape, tensors[1].shape))
    if func is F.pad and not tensors[0].is_meta:
        return int(func(*_changed(args, _on_meta), **kwargs).numel())
    return sum(tensor.numel() for tensor in tensors if not tensor.is_meta)


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to("meta")


def _changed(values: Iterable[Any], change: Callable[[torch.Tensor], torch.Tensor]) -> list[Any]:
    """`values` with `change` made to each tensor among them, and in lists and tuples of them."""
    return [
        change(value)
        if isinstance(value, torch.Tensor)
        else type(value)(_changed(value, change))
        if type(value) in (list, tuple)  # an index is a tuple and must stay one
        else value
        for value in values
    ]


# By name, since Transformers puts functions of its own in the place of those of `torch.nn.init`.
_RANDOM_FILLS = ("kaiming_uniform_", "normal_", "trunc_normal_", "uniform_", "xavier_normal_", "xavier_uniform_")
_MULTIPLICATIONS = (torch.mul, torch.Tensor.mul, torch.Tensor.__mul__)
_MATMULS = (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__)
# What scales scores, and the exponent of the number they are multiplied by.
_SCALINGS: dict[Callable[..., Any], int] = {
    **dict.fromkeys((*_MULTIPLICATIONS, torch.Tensor.__rmul__, torch.Tensor.__imul__, torch.Tensor.mul_), 1),
    **dict.fromkeys(
        (torch.div, torch.Tensor.div, torch.Tensor.__truediv__, torch.Tensor.__itruediv__, torch.Tensor.div_), -1
    ),
}
_OPERANDS = ("input", "mat1", "weight", "mat2", "other")
# Where a product has its rows and its weight among the operands, and the weight's dimension that the result takes.
_PRODUCTS: dict[Callable[..., Any], tuple[int, int, int]] = {
    F.linear: (0, 1, 0),
    F.embedding: (0, 1, 1),
    torch.addmm: (1, 2, 1),
    torch.mm: (0, 1, 1),
    torch.bmm: (0, 1, 2),
    torch.matmul: (0, 1, -1),
    torch.Tensor.matmul: (0, 1, -1),
    torch.Tensor.__matmul__: (0, 1, -1),
}
