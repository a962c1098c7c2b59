"""Tensors that stand for a layer's keys or values and become real only when somebody needs the numbers."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import torch
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from kvquant_hf.ops import decode_attention
from kvquant_hf.view import KVView

# Beyond this many query rows per key/value head, one dense dequantization costs less than the tiled pass.
MAX_FUSED_ROWS = 16


class _DensePair:
    """The dense keys and values of a view, made at most once."""

    def __init__(self, view: KVView) -> None:
        self.view = view
        self._dense: tuple[torch.Tensor, torch.Tensor] | None = None

    def dense(self) -> tuple[torch.Tensor, torch.Tensor]:
        self.view.check_current()
        if self._dense is None:
            self._dense = self.view.dense()
        return self._dense


class LazyKV(torch.Tensor):
    """Keys or values of a cache layer: shape, dtype and device without storage.

    `torch.nn.functional.scaled_dot_product_attention` over a pair of them reads the packed cache through
    `kvquant_hf.ops.decode_attention`. Every other operation first makes the dense tensor, so any attention
    implementation works. Reading one after its cache has changed raises `StaleViewError`.
    """

    _pair: _DensePair
    _side: int

    @staticmethod
    def __new__(cls, pair: _DensePair, side: int) -> "LazyKV":
        """A stand-in for side 0 (keys) or 1 (values) of `pair`."""
        view = pair.view
        lazy: LazyKV = torch.Tensor._make_wrapper_subclass(
            cls,
            view.value_shape if side else view.key_shape,
            dtype=view.value_dtype if side else view.key_dtype,
            device=view.device,
        )
        lazy._pair, lazy._side = pair, side
        return lazy

    @property
    def view_of_cache(self) -> KVView:
        """What this tensor stands for."""
        return self._pair.view

    @property
    def is_key(self) -> bool:
        """Whether this stands for keys rather than values."""
        return self._side == 0

    def to_dense(self) -> torch.Tensor:  # type: ignore[override]
        """The real tensor, `[B, H, T, D]`, shared by all uses of this update."""
        return self._pair.dense()[self._side]

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


def is_lazy_pair(key: object, value: object) -> bool:
    """Whether two tensors are the keys and values of one cache update."""
    return (
        isinstance(key, LazyKV)
        and isinstance(value, LazyKV)
        and key._pair is value._pair
        and (key._side, value._side) == (0, 1)
    )


def fits_fused(query: torch.Tensor, view: KVView) -> bool:
    """Whether the fused operation is the better way to serve this query: one new token, or few rows per head."""
    if view.backend == "dense":
        return False
    rows = query.shape[1] * query.shape[2] // view.key_shape[1]
    return view.query_length == 1 or rows <= MAX_FUSED_ROWS


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
    if is_lazy_pair(key, value) and dropout_p == 0.0 and not is_causal and not isinstance(query, LazyKV):
        view = cast(LazyKV, key).view_of_cache
        same_heads = query.ndim == 4 and (enable_gqa or query.shape[1] == view.key_shape[1])
        if same_heads and fits_fused(query, view):
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
