"""What a cache layer holds must depend on the tokens alone, not on how calls cut them."""

import torch

from kvquant_hf.config import KVQuantConfig
from kvquant_hf.layer import QuantLayer
from kvquant_hf.rope import KeyRotation

ROTATION = KeyRotation(1 / 100 ** (torch.arange(16) / 16), 32)


def assert_cuts_change_nothing(
    config: KVQuantConfig, states: torch.Tensor, cuts: list[int], padding: list[int] | None = None
) -> QuantLayer:
    """Feed tokens at once, one by one and in pieces; what is stored must be equal bit for bit.

    Args:
        config: Settings of the layer.
        states: Keys and values, `[2, B, H, T, 32]`.
        cuts: Sizes of the pieces, `T` in all.
        padding: Left padding of each row.

    Returns:
        The layer that was fed at once.
    """
    layers = []
    for sizes in ([sum(cuts)], [1] * sum(cuts), cuts):
        layer = QuantLayer(config, ROTATION)
        if padding is not None:
            layer.set_padding(torch.tensor(padding))
        for piece in states.split(sizes, dim=3):
            layer.update(*piece)
        layers.append(layer)
    for other in layers[1:]:
        for mine, theirs in zip(layers[0]._block_stores(), other._block_stores(), strict=True):
            found, expected = theirs.state(), mine.state()
            assert found.keys() == expected.keys()
            for name, tensor in expected.items():
                assert torch.equal(found[name], tensor), name
            assert torch.equal(theirs.read(0, theirs.num_blocks), mine.read(0, mine.num_blocks))
    return layers[0]
