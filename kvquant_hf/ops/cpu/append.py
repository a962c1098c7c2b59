"""Copying the keys and values of one token into the residual window, at a third of the cost of two tensor copies."""

from array import array
from typing import Any

import torch

from kvquant_hf.ops.cpu.build import BuildError
from kvquant_hf.ops.cpu.encoding import library

# Places in the arguments, see `Append` in encode.cpp.
_TO, _FROM, _FROM_STRIDES = 0, 2, 8


class Appender:
    """Copies tokens to a pair of buffers `[B, H, capacity, D]` that stay where they are.

    Args:
        keys: Buffer of keys.
        values: Buffer of values.
    """

    __slots__ = ("_address", "_args", "_function", "_starts", "_steps", "_strides", "keys", "values")

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.keys, self.values = keys, values
        pair = (keys, values)
        sizes = [tensor.element_size() for tensor in pair]
        self._starts = tuple(tensor.data_ptr() for tensor in pair)
        self._steps = tuple(tensor.stride(2) * size for tensor, size in zip(pair, sizes, strict=True))
        self._strides: list[tuple[int, ...]] = [(), ()]
        fields = [0] * 4
        for dim in (0, 1):
            fields += [tensor.stride(dim) * size for tensor, size in zip(pair, sizes, strict=True)]
        fields += [0] * 4
        fields += [tensor.shape[3] * size for tensor, size in zip(pair, sizes, strict=True)]
        self._args = array("q", [*fields, keys.shape[0], keys.shape[1]])
        self._address = self._args.buffer_info()[0]
        self._function: Any = library().kvquant_append

    def append(self, key_states: torch.Tensor, value_states: torch.Tensor, slot: int) -> bool:
        """Copy one token, `[B, H, 1, D]` each, to `slot` of the buffers; false if it lies in no shape for that."""
        args = self._args
        for side, states in enumerate((key_states, value_states)):
            strides = states.stride()
            if strides != self._strides[side]:
                if strides[3] != 1:
                    return False
                size = states.element_size()
                args[_FROM_STRIDES + side] = strides[0] * size
                args[_FROM_STRIDES + 2 + side] = strides[1] * size
                self._strides[side] = strides
            args[_FROM + side] = states.data_ptr()
            args[_TO + side] = self._starts[side] + slot * self._steps[side]
        self._function(self._address)
        return True


def appender(keys: torch.Tensor, values: torch.Tensor) -> Appender | None:
    """An `Appender` for buffers on the CPU, or `None` where the compiled code is missing."""
    if keys.device.type != "cpu" or keys.stride(3) != 1 or values.stride(3) != 1:
        return None
    try:
        return Appender(keys, values)
    except BuildError:
        return None  # said by whoever quantizes or attends
