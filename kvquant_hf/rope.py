"""Undoing and redoing rotary position embeddings (RoPE) on stored keys.

Keys reach a cache already rotated. `KeyRotation` turns them back to their pre-RoPE form before quantization, where
outlier channels are fixed (KVQuant, arXiv 2401.18079, section 3.2), and rotates them again when they are read. Both
directions use the same angles, so the round trip is the identity whatever the angles are: a wrong guess of the model's
frequencies costs quality, never correctness.

This module is plain tensor arithmetic; which rotation a model uses is found in `rope_probe.py`.
"""

from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

import torch

Pairing = Literal["half", "interleaved"]


@dataclass(frozen=True, eq=False)
class KeyRotation:
    """The rotation a model applies to the keys of one layer.

    Attributes:
        inv_freq: Angle per position of each channel pair, shape `[rotary_dim / 2]`, float32, radians.
        head_dim: Size of a key vector.
        offset: First rotated channel; channels outside `offset … offset + rotary_dim - 1` pass unchanged.
        pairing: Which channels form a pair: `half` pairs channel `i` with `i + rotary_dim / 2`, `interleaved` pairs
            `2i` with `2i + 1` (both counted from `offset`).
        long_inv_freq: Angles used instead of `inv_freq` for sequences longer than `original_length` (LongRoPE,
            arXiv 2402.13753, as Transformers implements it), or `None`.
        original_length: Tokens up to which `inv_freq` applies when `long_inv_freq` is given.
    """

    inv_freq: torch.Tensor
    head_dim: int
    offset: int = 0
    pairing: Pairing = "half"
    long_inv_freq: torch.Tensor | None = None
    original_length: int | None = None

    def __post_init__(self) -> None:
        if self.inv_freq.ndim != 1 or self.inv_freq.numel() == 0:
            raise ValueError(f"`inv_freq` must be a non-empty vector, got shape {tuple(self.inv_freq.shape)}.")
        if self.pairing not in ("half", "interleaved"):
            raise ValueError(f"`pairing` must be one of ('half', 'interleaved'), got {self.pairing!r}.")
        if self.offset < 0 or self.offset + self.rotary_dim > self.head_dim:
            raise ValueError(
                f"`offset` + rotary width must lie within `head_dim` ({self.head_dim}), got {self.offset} + "
                f"{self.rotary_dim}."
            )

    def _content(self) -> tuple[object, ...]:
        tables = (self.inv_freq, self.long_inv_freq)
        return (
            *(None if table is None else table.cpu().numpy().tobytes() for table in tables),
            self.head_dim,
            self.offset,
            self.pairing,
            self.original_length,
        )

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, KeyRotation) and self._content() == other._content()

    def __hash__(self) -> int:
        found = self.__dict__.get("_hash")
        if found is None:
            found = hash(self._content())
            object.__setattr__(self, "_hash", found)
        return int(found)

    def __getstate__(self) -> dict[str, object]:
        # Hashes of bytes differ from process to process.
        return {name: value for name, value in self.__dict__.items() if name != "_hash"}

    @property
    def rotary_dim(self) -> int:
        """Number of rotated channels."""
        return 2 * self.inv_freq.numel()

    def for_length(self, seq_len: int) -> "KeyRotation":
        """The rotation of a prompt of `seq_len` tokens: by the long table of LongRoPE beyond its limit."""
        if self.long_inv_freq is None or self.original_length is None or seq_len <= self.original_length:
            return self
        return replace(self, inv_freq=self.long_inv_freq, long_inv_freq=None)

    def tables(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of positions.

        Angles are formed in float64: in float32 an angle at position 100,000 is off by up to 0.004, and tables put
        together from two angles (`block_tables`) would differ from these.

        Args:
            positions: Integer positions, any shape `[...]`.

        Returns:
            `(cos, sin)`, each `[..., rotary_dim / 2]`, float32, on the device of `positions`.
        """
        device = positions.device if positions.device.type != "mps" else torch.device("cpu")  # no float64 on MPS
        angles = positions.to(device)[..., None].double() * self.inv_freq.to(device)
        return angles.cos().float().to(positions.device), angles.sin().float().to(positions.device)

    def block_tables(
        self, first_position: int, num_blocks: int, block_length: int, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of consecutive blocks, from one table per block start and one per offset in a block.

        `cos(a + b)` and `sin(a + b)` are formed from the two small tables: about `num_blocks + block_length`
        trigonometric evaluations per pair instead of `num_blocks · block_length`.

        Returns:
            `(cos, sin)`, each `[num_blocks, block_length, rotary_dim / 2]`, float32.
        """
        starts = first_position + block_length * torch.arange(num_blocks, device=device)
        cos_a, sin_a = (t[:, None, :] for t in self.tables(starts))
        cos_b, sin_b = self.tables(torch.arange(block_length, device=device))
        return cos_a * cos_b - sin_a * sin_b, sin_a * cos_b + cos_a * sin_b

    def partners(self) -> torch.Tensor:
        """The channel that each channel is rotated with, itself if it is not rotated: `[head_dim]`, int64."""
        return _partners(self.head_dim, self.offset, self.rotary_dim, self.pairing)

    def apply(
        self, key_states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, inverse: bool = False
    ) -> torch.Tensor:
        """Rotate keys, or undo the rotation.

        Args:
            key_states: `[..., T, head_dim]`, computed in its own dtype (callers pass float32).
            cos: Cosines that broadcast against `[..., T, rotary_dim / 2]`.
            sin: Sines of the same shape.
            inverse: Undo instead of apply.

        Returns:
            A new tensor of the shape and dtype of `key_states`.
        """
        if inverse:
            sin = -sin
        out = key_states.clone()
        end = self.offset + self.rotary_dim
        if self.pairing == "half":
            middle = self.offset + self.rotary_dim // 2
            first, second = slice(self.offset, middle), slice(middle, end)
        else:
            first, second = slice(self.offset, end, 2), slice(self.offset + 1, end, 2)
        x, y = key_states[..., first], key_states[..., second]
        out[..., first] = x * cos - y * sin
        out[..., second] = y * cos + x * sin
        return out

    def __repr__(self) -> str:
        width = "" if self.rotary_dim == self.head_dim else f", {self.rotary_dim} of {self.head_dim} channels"
        return f"KeyRotation({self.pairing}{width})"


@cache
def _partners(head_dim: int, offset: int, rotary_dim: int, pairing: Pairing) -> torch.Tensor:
    """`KeyRotation.partners`, one tensor for all layers."""
    with torch.inference_mode(False):
        partners = torch.arange(head_dim)
        rotated = partners[offset : offset + rotary_dim].clone()
        if pairing == "half":
            swapped = rotated.roll(rotary_dim // 2)
        else:
            swapped = rotated.unflatten(0, (-1, 2)).flip(-1).flatten()
        partners[offset : offset + rotary_dim] = swapped
        return partners
