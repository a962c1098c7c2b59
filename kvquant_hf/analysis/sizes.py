"""What keys and values of a layer take up under every pair of candidates, read off real cache layers."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from kvquant_hf.analysis.candidates import Candidates
from kvquant_hf.cache import QuantCache
from kvquant_hf.config import KVQuantConfig
from kvquant_hf.eval.bits import model_shapes, replayed_bits
from kvquant_hf.layer import QuantLayer
from kvquant_hf.rope import KeyRotation
from kvquant_hf.rope_probe import find_rotations

BITS_DTYPE = torch.bfloat16
Shape = tuple[int, int, int]
Pair = tuple[str, str]


@dataclass(frozen=True)
class PairSize:
    """Size of one layer under one pair of settings, of a 16-bit model.

    Attributes:
        bits: Bits of a token in a quantized block, scales, zero points and factors included; a side of 16 bits counts
            as such.
        memory_bytes: Everything held after a prompt of `context_length` tokens, windows and sinks included.
    """

    bits: float
    memory_bytes: int


class SizeTable:
    """Sizes of the layers of a model that a cache quantizes.

    Args:
        model: Causal language model.
        frame: Settings of the cache besides keys and values: windows and backend.
        candidates: Settings of keys and values.
        context_length: Tokens of the sequence whose bytes are counted.

    Attributes:
        layers: Indices of the layers.
        shapes: `(num_kv_heads, key_dim, value_dim)` by layer.
        values: Key and value elements of one token, by layer.
        others: Bytes of the layers that are not quantized, after that sequence. States of linear attention, which do
            not grow, are not counted.
    """

    def __init__(
        self, model: PreTrainedModel, frame: KVQuantConfig, candidates: Candidates, context_length: int
    ) -> None:
        self._model = model
        self._frame = frame
        self._shapes = model_shapes(model)  # of all layers
        self.context_length = context_length
        self.layers = QuantCache(model).quantized_layers
        self.shapes = {index: self._shape(index) for index in self.layers}
        self.values = {index: heads * (key + value) for index, (heads, key, value) in self.shapes.items()}
        rotations = find_rotations(model)
        known: dict[tuple[Shape, bool], dict[Pair, PairSize]] = {}
        self._sizes: dict[int, dict[Pair, PairSize]] = {}
        for index in self.layers:
            rotation = rotations[index].rotation
            kind = (self.shapes[index], rotation is None)
            if kind not in known:
                known[kind] = {
                    (key, value): _pair_size(
                        frame.replace(key=key_spec, value=value_spec), rotation, self.shapes[index], context_length
                    )
                    for key, key_spec in candidates.key.items()
                    for value, value_spec in candidates.value.items()
                }
            self._sizes[index] = known[kind]
        self.others = self._other_bytes()

    def _shape(self, index: int) -> Shape:
        shape = self._shapes[index]
        if shape is None:
            raise ValueError(f"Layer {index} of {type(self._model).__name__} stored no keys and values.")
        return shape

    def pair(self, index: int, key: str, value: str) -> PairSize:
        """Size of the layer `index` under the candidates `key` and `value`."""
        return self._sizes[index][key, value]

    def bits_per_value(self, pairs: Mapping[int, Pair]) -> float:
        """Mean bits of the quantized part over all layers, by candidates of each layer."""
        bits = sum(self.pair(index, *pairs[index]).bits for index in self.layers)
        return bits / sum(self.values.values())

    def memory_bytes(self, pairs: Mapping[int, Pair]) -> int:
        """Bytes of the whole cache, by candidates of each layer."""
        return self.others + sum(self.pair(index, *pairs[index]).memory_bytes for index in self.layers)

    def _other_bytes(self) -> int:
        shapes = [None if index in self.layers else shape for index, shape in enumerate(self._shapes)]
        if not any(shapes):
            return 0
        pieces = [(0, self.context_length)]
        return replayed_bits(lambda: QuantCache(self._model, self._frame), shapes, pieces, BITS_DTYPE).memory_bytes

    def measured_bits(self, config: KVQuantConfig) -> float:
        """`bits_per_value` of a real cache, whose layers all hold the same tokens as codes."""
        cache = QuantCache(self._model, config)
        exact = self._frame.sink_length + self._frame.residual_length
        bits = 0.0
        for index in self.layers:
            layer = cache.quantized_layer(index)
            if not layer.config.is_quantized:
                bits += 8 * BITS_DTYPE.itemsize * self.values[index]
                continue
            _feed(layer, self.shapes[index], exact + 2 * layer.config.block_length)
            bits += 8 * _block_bytes(layer) / layer.quantized_length
        return bits / sum(self.values.values())

    def measured_bytes(self, config: KVQuantConfig) -> int:
        """`memory_bytes` of a real cache that was given a prompt of `context_length` tokens."""
        pieces = [(0, self.context_length)]
        return replayed_bits(lambda: QuantCache(self._model, config), self._shapes, pieces, BITS_DTYPE).memory_bytes


def _pair_size(config: KVQuantConfig, rotation: KeyRotation | None, shape: Shape, tokens: int) -> PairSize:
    """Sizes of a layer; blocks of one prompt are all alike, so that three of them tell the size of any number."""
    if not config.is_quantized:
        bits = 8 * BITS_DTYPE.itemsize * shape[0] * (shape[1] + shape[2])
        return PairSize(bits, _memory_bytes(_filled(config, rotation, shape, tokens)))
    length, exact = config.block_length, config.sink_length + config.residual_length
    two, three = (_filled(config, rotation, shape, exact + count * length) for count in (2, 3))
    block = _block_bytes(three) - _block_bytes(two)
    blocks = max(0, tokens - exact) // length
    left_out = max(0, blocks - 2)
    held = _memory_bytes(_filled(config, rotation, shape, tokens - left_out * length))
    return PairSize(8 * block / length, held + left_out * block)


def _filled(config: KVQuantConfig, rotation: KeyRotation | None, shape: Shape, tokens: int) -> QuantLayer:
    layer = QuantLayer(config, rotation)
    _feed(layer, shape, tokens)
    return layer


def _feed(layer: QuantLayer, shape: Shape, tokens: int) -> None:
    heads, key_dim, value_dim = shape
    generator = torch.Generator().manual_seed(0)
    states = (torch.randn(1, heads, tokens, size, generator=generator).to(BITS_DTYPE) for size in (key_dim, value_dim))
    layer.update(*states)


def _memory_bytes(layer: QuantLayer) -> int:
    return sum(layer.memory()[0].values())


def _block_bytes(layer: QuantLayer) -> int:
    parts = layer.memory()[0]
    return parts["codes"] + parts["scales"] + parts["zero_points"]
