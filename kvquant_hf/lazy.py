"""Tensors that stand for a layer's keys or values and become real only when somebody needs the numbers."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import torch
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map

from kvquant_hf.ops import decode_attention
from kvquant_hf.view import KVView

# Beyond this many query rows per key/value head, one dense dequantization costs less than the tiled pass.
MAX_FUSED_ROWS = 16
# A function of a tensor and its other arguments.
_Step = tuple[Callable[..., Any], tuple[Any, ...], Mapping[str, Any]]
# What eager attention does with keys before it multiplies, and the products.
_ARRANGE = {
    *(torch.Tensor.__getitem__, torch.Tensor.expand, torch.Tensor.reshape, torch.reshape),
    *(torch.Tensor.repeat_interleave, torch.repeat_interleave, torch.Tensor.transpose, torch.transpose),
}
_TRANSPOSE = (torch.Tensor.transpose, torch.transpose)
_PRODUCTS = {torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__}


Pair = tuple[torch.Tensor, torch.Tensor]


class _DensePair:
    """The dense keys and values of a view, made at most once."""

    # Whether the layer wants to see the queries first.
    waits = False
    # Whether attention reads the tensors that the layer was given.
    is_given = False

    def __init__(self, view: KVView) -> None:
        self.view = view
        self._dense: Pair | None = None

    def show(self, query: torch.Tensor | None, scale: float | None) -> None:
        """Tell the layer what attention asks."""

    def dense(self, side: int) -> torch.Tensor:
        """Keys (side 0) or values."""
        self.view.check_current()
        if self._dense is None:
            self._dense = self.view.dense()
        return self._dense[side]


class _WatchedPair(_DensePair):
    """Keys and values of a layer that decides by the queries how it stores them.

    Args:
        view: The layer before it has decided; gives shapes.
        show: Called once, with the queries and the factor of their scores, or with `None` where the keys are read in
            a way that shows no queries. Returns the layer as attention should read it, `None` where it has moved on.
        given: Exact keys and values that attention reads instead, those of a prompt.
    """

    def __init__(self, view: KVView, show: "Show", given: Pair | None) -> None:
        super().__init__(view)
        self.waits = True
        self.is_given = given is not None
        self._show = show
        self._given = given

    def show(self, query: torch.Tensor | None, scale: float | None) -> None:
        """Let the layer decide, once."""
        if self.waits:
            if self._given is None:
                self.view.check_current()
            self.waits = False
            self.view = self._show(query, scale) or self.view

    def dense(self, side: int) -> torch.Tensor:
        """Keys (side 0) or values. Values of a prompt may be read before attention has asked."""
        if self._given is None or side == 0:
            self.show(None, None)
        return super().dense(side) if self._given is None else self._given[side]


Show = Callable[[torch.Tensor | None, float | None], KVView | None]


class LazyKV(torch.Tensor):
    """Keys or values of a cache layer: shape, dtype and device without storage.

    `torch.nn.functional.scaled_dot_product_attention` over a pair of them reads the packed cache through
    `kvquant_hf.ops.decode_attention`. Every other operation first makes the dense tensor, so any attention
    implementation works. Reading one after its cache has changed raises `StaleViewError`.

    Where a layer wants to see the queries before it decides how to store its keys (`attention_guard`), operations
    that only arrange keys, as repeating them for heads that share them, wait until a product brings the queries.
    """

    _pair: _DensePair
    _side: int
    _steps: tuple[_Step, ...]

    @staticmethod
    def __new__(
        cls, pair: _DensePair, side: int, like: torch.Tensor | None = None, steps: tuple[_Step, ...] = ()
    ) -> "LazyKV":
        """A stand-in for side 0 (keys) or 1 (values) of `pair`, or for what `steps` make of it, formed `like` this."""
        view = pair.view
        lazy: LazyKV = torch.Tensor._make_wrapper_subclass(
            cls,
            (view.value_shape if side else view.key_shape) if like is None else like.shape,
            strides=None if like is None else like.stride(),
            dtype=view.value_dtype if side else view.key_dtype,
            device=view.device,
        )
        lazy._pair, lazy._side, lazy._steps = pair, side, steps
        return lazy

    @property
    def view_of_cache(self) -> KVView:
        """What this tensor stands for."""
        return self._pair.view

    @property
    def is_key(self) -> bool:
        """Whether this stands for keys rather than values."""
        return self._side == 0

    @property
    def is_given(self) -> bool:
        """Whether this stands for the very tensors that an empty layer was given."""
        return self._pair.is_given

    @property
    def is_arranged(self) -> bool:
        """Whether this stands for what became of keys or values since the update that handed them out."""
        return bool(self._steps)

    @property
    def waits(self) -> bool:
        """Whether the layer wants to see the queries first."""
        return self._pair.waits

    def show(self, query: torch.Tensor, scale: float | None) -> None:
        """Let a layer that waits see what attention asks of these keys.

        Args:
            query: `[B, H_q, t, D]` of the tokens of the update.
            scale: Factor of the scores, `None` where it is not known here.
        """
        if self.is_key:
            self._pair.show(query, scale)

    def to_dense(self) -> torch.Tensor:  # type: ignore[override]
        """The real tensor, `[B, H, T, D]`, shared by all uses of this update."""
        dense = self._pair.dense(self._side)
        for func, args, kwargs in self._steps:
            dense = func(dense, *args, **kwargs)
        return dense

    def _arranged(self, step: _Step) -> "LazyKV":
        """What a step makes of this, later."""
        func, args, kwargs = step
        with torch._C.DisableTorchFunctionSubclass():
            like = func(torch.empty_strided(self.shape, self.stride(), device="meta"), *args, **kwargs)
        return LazyKV(self._pair, self._side, like, (*self._steps, step))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # no stub
        """Name, shape and dtype; does not read the cache."""
        with torch._C.DisableTorchFunctionSubclass():
            return f"LazyKV({'values' if self._side else 'keys'}, shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return _attend(*args, **kwargs)
        if func in _ARRANGE:
            lazy = args[0] if args else None
            if isinstance(lazy, LazyKV) and lazy.waits and _can_wait(func, args[1:], kwargs):
                return lazy._arranged((func, args[1:], kwargs))
        elif func in _PRODUCTS and len(args) == 2 and isinstance(args[1], LazyKV):
            query, key = args
            if key.waits and not isinstance(query, LazyKV):
                key.show(query, None)
                return func(query, key.to_dense())
        # Metadata is answered from the wrapper; whatever needs numbers arrives in __torch_dispatch__.
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # the stub declares an unbound function
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return func(*tree_map(_to_dense, args), **tree_map(_to_dense, dict(kwargs or {})))


def lazy_pair(view: KVView) -> tuple[LazyKV, LazyKV]:
    """Stand-ins for the keys and values of a view."""
    pair = _DensePair(view)
    return LazyKV(pair, 0), LazyKV(pair, 1)


def watched_pair(view: KVView, show: Show, given: Pair | None) -> tuple[LazyKV, LazyKV]:
    """Stand-ins for the keys and values of a layer that wants to see the queries, see `_WatchedPair`."""
    pair = _WatchedPair(view, show, given)
    return LazyKV(pair, 0), LazyKV(pair, 1)


def is_lazy_pair(key: object, value: object) -> bool:
    """Whether two tensors are the keys and values of one cache update, as they came from it."""
    return (
        isinstance(key, LazyKV)
        and isinstance(value, LazyKV)
        and key._pair is value._pair
        and (key._side, value._side) == (0, 1)
        and not (key._steps or value._steps)
    )


def fits_fused(query: torch.Tensor, view: KVView) -> bool:
    """Whether the fused operation is the better way to serve this query: one new token, or few rows per head."""
    if view.backend == "dense" or not query.shape[2]:
        return False
    rows = query.shape[1] * query.shape[2] // view.key_shape[1]
    return view.query_length == 1 or rows <= MAX_FUSED_ROWS


def _can_wait(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a step only arranges keys, and may be what attention does before it multiplies.

    Kernels that take tokens before heads get real tensors at once: not all of them ask for more than an address.
    """
    leaves = tree_leaves((args, dict(kwargs)))
    if func in _TRANSPOSE:
        return leaves in ([2, 3], [3, 2], [-1, -2], [-2, -1])
    if func is torch.Tensor.__getitem__:
        return all(leaf is None or leaf is Ellipsis or type(leaf) in (int, slice) for leaf in leaves)
    return not any(isinstance(leaf, torch.Tensor) for leaf in leaves)


def _to_dense(value: Any) -> Any:
    return value.to_dense() if isinstance(value, LazyKV) else value


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """`F.scaled_dot_product_attention` where keys or values are lazy."""
    if isinstance(key, LazyKV) and not isinstance(query, LazyKV):
        key.show(query, query.shape[-1] ** -0.5 if scale is None else scale)
    if is_lazy_pair(key, value) and dropout_p == 0.0 and not is_causal and not isinstance(query, LazyKV):
        key = cast(LazyKV, key)
        view = key.view_of_cache
        same_heads = query.ndim == 4 and (enable_gqa or query.shape[1] == view.key_shape[1])
        if same_heads and not key.is_given and fits_fused(query, view):
            return decode_attention(query, view, attn_mask, scale)
    query, key, value = (_to_dense(tensor) for tensor in (query, key, value))
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=attn_mask,
        dropout_p=dropout_p,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
    )
