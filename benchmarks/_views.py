"""Data of the attention benchmark: one layer over random tokens, as packed views and as dense tensors, in pools."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from _backends import no_fallback
from torch.nn import functional as F

from kvquant_hf import KVQuantConfig, QuantSpec
from kvquant_hf.layer import QuantLayer
from kvquant_hf.ops import decode_attention
from kvquant_hf.ops.reference import decode_attention as reference_attention
from kvquant_hf.rope import KeyRotation
from kvquant_hf.storage import BlockStore
from kvquant_hf.view import KVView

States = tuple[torch.Tensor, torch.Tensor]
# Largest relative error of a kernel against its float32 twin for which a time is worth reporting.
_LARGEST_ERROR = {torch.float32: 2e-3, torch.bfloat16: 1e-2}


@dataclass(frozen=True)
class Shape:
    """Sizes of one decode step: batch, key/value heads, query heads per key/value head, head size."""

    batch_size: int
    num_kv_heads: int
    group: int
    head_dim: int

    @classmethod
    def parse(cls, text: str) -> "Shape":
        """A shape from `B,H_kv,G,D`.

        Raises:
            ValueError: The text has another form.
        """
        parts = text.split(",")
        if len(parts) != 4 or not all(part.isdecimal() and int(part) for part in parts):
            raise ValueError(f"`shape` must be four positive integers B,H_kv,G,D such as 1,8,4,128, got {text!r}.")
        return cls(*(int(part) for part in parts))

    def __str__(self) -> str:
        return f"{self.batch_size},{self.num_kv_heads},{self.group},{self.head_dim}"

    def dense_bytes(self, context: int, dtype: torch.dtype) -> int:
        """Bytes of dense keys and values of `context` tokens."""
        return 2 * self.batch_size * self.num_kv_heads * self.head_dim * context * dtype.itemsize

    def states(self, context: int, seed: int = 0) -> States:
        """Random keys and values `[B, H_kv, context, D]`, float32, N(0, 1)."""
        generator = torch.Generator().manual_seed(seed)
        size = (self.batch_size, self.num_kv_heads, context, self.head_dim)
        return torch.randn(size, generator=generator), torch.randn(size, generator=generator)

    def query(self, dtype: torch.dtype) -> torch.Tensor:
        """A random query `[B, H_kv · G, 1, D]`, N(0, 1)."""
        generator = torch.Generator().manual_seed(1)
        size = (self.batch_size, self.num_kv_heads * self.group, 1, self.head_dim)
        return torch.randn(size, generator=generator).to(dtype)


def rotation(head_dim: int) -> KeyRotation:
    """The rotary embedding of Llama, base 10,000."""
    inv_freq = 10_000.0 ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    return KeyRotation(inv_freq, head_dim)


def packed_view(config: KVQuantConfig, states: States, backend: str) -> KVView:
    """What a layer with these settings hands to attention after the tokens `[B, H, T, D]`."""
    layer = QuantLayer(config.replace(backend=backend), rotation(states[0].shape[3]))
    layer.update(*states)
    return layer.view()


def unquantized_view(view: KVView, states: States) -> KVView:
    """The same view with its blocks stored as they are, 16 bits a number: what the same kernel does without codes.

    Keys are stored after RoPE, as every unquantized cache has them, so there is nothing to rotate. Sinks and residual
    window are those of `view`.
    """
    first, length = view.num_sinks, view.block_length
    end = first + view.num_blocks * length
    stores = []
    for store, side in zip((view.key_store, view.value_store), states, strict=True):
        # What belongs to codes (outliers, tables, …) does not go with 16 bits.
        kept = {name: getattr(store.spec, name) for name in ("granularity", "group_size", "rope")}
        spec = QuantSpec(nbits=16, **kept)
        batch_size, heads, _, head_dim = side.shape
        plain = BlockStore(spec, length, head_dim, side.dtype)
        plain.append(plain.encode(side[:, :, first:end].reshape(batch_size, heads, -1, length, head_dim)), spare=False)
        stores.append(plain)
    return replace(view, key_store=stores[0], value_store=stores[1], rotation=None)


def view_bytes(view: KVView) -> int:
    """Bytes that attention has to read: codes, scales, zero points, sinks, residual window."""
    size = 0
    for store in (view.key_store, view.value_store):
        parts = store.bytes_by_part()
        size += sum(parts.values()) - parts["unused"]
    for pair in (view.sinks, view.residual):
        size += sum(tensor.numel() * tensor.element_size() for tensor in pair or ())
    return size


def _copied(view: KVView) -> KVView:
    stores = [copy.copy(store) for store in (view.key_store, view.value_store)]
    for store in stores:
        store.map(torch.clone)
    sinks, windows = copy.deepcopy((view.sinks, view.windows))
    return replace(view, key_store=stores[0], value_store=stores[1], sinks=sinks, windows=windows)


def pool_size(item_bytes: int, pool_bytes: int) -> int:
    """Items whose bytes add up to the pool's, at least one."""
    return max(1, -(-pool_bytes // item_bytes))


def view_pool(view: KVView, pool_bytes: int) -> list[KVView]:
    """Copies of a view, each with memory of its own."""
    return [view, *(_copied(view) for _ in range(pool_size(view_bytes(view), pool_bytes) - 1))]


def dense_pool(states: States, pool_bytes: int) -> list[States]:
    """Copies of dense keys and values."""
    item_bytes = sum(side.numel() * side.element_size() for side in states)
    copies = range(pool_size(item_bytes, pool_bytes) - 1)
    return [states, *((states[0].clone(), states[1].clone()) for _ in copies)]


def sdpa_call(form: str, shape: Shape, pool: Sequence[States]) -> Callable[[int], torch.Tensor]:
    """PyTorch's attention over item `i` of a pool, in one of its forms for grouped queries.

    `rows` hands the queries that share a key/value head over as rows of one head; `gqa` is `enable_gqa=True`.
    """
    query = shape.query(pool[0][0].dtype)
    if form == "rows":
        query = query.reshape(shape.batch_size, shape.num_kv_heads, shape.group, shape.head_dim)
    grouped = form == "gqa"
    return lambda i: F.scaled_dot_product_attention(query, *pool[i], enable_gqa=grouped)


def kernel_call(shape: Shape, pool: Sequence[KVView]) -> Callable[[int], torch.Tensor]:
    """Fused attention over item `i` of a pool, through the entry the cache uses."""
    query = shape.query(pool[0].key_dtype)
    return lambda i: decode_attention(query, pool[i])


def refusal(shape: Shape, view: KVView) -> str | None:
    """Why the view's backend gives no time worth reporting, or `None`: it cannot read the view, or reads it wrongly.

    Raises:
        RuntimeError: The output is wrong.
    """
    query = shape.query(view.key_dtype)
    try:
        with no_fallback(view.backend):
            output = decode_attention(query, view)
    except (ValueError, RuntimeError) as error:
        return str(error)
    expected = reference_attention(query.float(), view, None, shape.head_dim**-0.5)
    off = float((output.float() - expected).norm() / expected.norm())
    if not off <= _LARGEST_ERROR[query.dtype]:
        raise RuntimeError(f"backend {view.backend!r} is off by {off:.2g} of its float32 twin: no time is reported.")
    return None
