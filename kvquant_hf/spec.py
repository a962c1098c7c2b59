"""How one kind of tensor, keys or values, is stored."""

from dataclasses import dataclass

from kvquant_hf.checks import check_choice

NBITS = (2, 3, 4, 8, 16)
GROUP_SIZES = (16, 32, 64, 128)
GRANULARITIES = ("per_channel", "per_token")
ROPE_ORDERS = ("pre", "post")
ROTATIONS = ("none", "hadamard", "hadamard_signs", "grouped_heads")
CLIPS = ("minmax", "mse")
PROMOTED_SHARES = (0.0, 0.125, 0.25, 0.5)
# Bits that a promoted channel has more than the others.
EXTRA_BITS = 2
METHODS = ("affine", "variance_normalized")
# Methods that treat a block as a tile of tokens and channels, and store a factor along its rows.
_TILE_METHODS = ("variance_normalized",)


@dataclass(frozen=True)
class QuantSpec:
    """How one kind of tensor, keys or values, is stored.

    Attributes:
        nbits: Bits per code; 16 stores the tensor as it is, in the model's dtype.
        granularity: Where a scale is shared: `per_channel` (one channel of consecutive tokens, KIVI's choice for keys,
            arXiv 2402.02750 section 3) or `per_token` (consecutive channels of one token, its choice for values).
        group_size: Elements that share a scale and a zero point. A head size that the group does not divide leaves
            one shorter group per token.
        rope: Whether keys are quantized before (`pre`, KVQuant, arXiv 2401.18079 section 3.2) or after (`post`) the
            rotary embedding. Values are never rotated.
        rotation: `hadamard` multiplies the head dimension by an orthonormal Hadamard matrix before quantization and
            undoes it on reading (QuaRot, arXiv 2404.00456 section 4); `hadamard_signs` gives each channel a fixed sign
            first; `grouped_heads` also mixes heads at equal channel, in groups of 4 or 2 as their number permits
            (RotateKV, IJCAI 2025), and is always undone on reading: attention cannot take it over.
        method: Quantizer, a name in `kvquant_hf.quantizers.QUANTIZERS`: `affine`, or `variance_normalized`, which
            first brings channels and tokens of a tile to equal spread (KVarN, arXiv 2606.03458). Its tiles have at
            least `group_size` tokens.
        symmetric: Codes evenly about zero, at odd multiples of half a scale, with no zero point to store. Pays for
            values in the Hadamard basis, whose mean is zero.
        clip: Range of a group: its minimum and maximum (`minmax`), or the shrunken range of least squared error
            (`mse`).
        promoted: Share of the channels of a block that get two more bits, those of widest range (Kitty, arXiv
            2511.18643). For affine, asymmetric codes per channel of 2 to 4 bits.
    """

    nbits: int = 4
    granularity: str = "per_channel"
    group_size: int = 32
    rope: str = "pre"
    rotation: str = "none"
    method: str = "affine"
    symmetric: bool = False
    clip: str = "minmax"
    promoted: float = 0.0

    def __post_init__(self) -> None:
        check_choice("nbits", self.nbits, NBITS)
        check_choice("granularity", self.granularity, GRANULARITIES)
        check_choice("group_size", self.group_size, GROUP_SIZES)
        check_choice("rope", self.rope, ROPE_ORDERS)
        check_choice("rotation", self.rotation, ROTATIONS)
        check_choice("method", self.method, METHODS)
        check_choice("symmetric", self.symmetric, (False, True))
        check_choice("clip", self.clip, CLIPS)
        if self.promoted == 0 and not isinstance(self.promoted, bool):
            object.__setattr__(self, "promoted", 0.0)  # YAML reads 0 as an integer
        check_choice("promoted", self.promoted, PROMOTED_SHARES)
        if self.promoted:
            self._check_promotion()

    def _check_promotion(self) -> None:
        allowed = {"granularity": ("per_channel",), "method": ("affine",), "symmetric": (False,), "nbits": (2, 3, 4)}
        for name, choices in allowed.items():
            if getattr(self, name) not in choices:
                raise ValueError(
                    f"`promoted` must be 0 unless `{name}` is one of {choices}, got promoted={self.promoted} and "
                    f"{name}={getattr(self, name)!r}."
                )

    def num_promoted(self, head_dim: int) -> int:
        """Channels of a head that get more bits: an even number, at least two if any."""
        return 2 * max(1, int(self.promoted * head_dim / 2)) if self.promoted else 0

    @property
    def is_quantized(self) -> bool:
        """Whether codes are stored (fewer than 16 bits)."""
        return self.nbits < 16

    @property
    def token_group(self) -> int:
        """Consecutive tokens that must be quantized together."""
        return self.group_size if self.granularity == "per_channel" or self.method in _TILE_METHODS else 1

    @property
    def has_factor(self) -> bool:
        """Whether blocks have a factor besides scales and zero points (`QuantizedGroups.factor`)."""
        return self.is_quantized and self.method in _TILE_METHODS

    def code_bits(self, head_dim: int) -> float:
        """Bits per value of the codes, mean over channels."""
        return self.nbits + EXTRA_BITS * self.num_promoted(head_dim) / head_dim

    def metadata_bits(self, head_dim: int, block_length: int | None = None) -> float:
        """Bits per value spent on 16-bit scales, zero points and factors, and on the numbers of promoted channels.

        Args:
            head_dim: Size of a key or value.
            block_length: Tokens of a block; the shortest that serves by default.
        """
        if not self.is_quantized:
            return 0.0
        words = 1 if self.symmetric else 2
        if self.granularity == "per_channel":
            numbers = 8.0 * self.num_promoted(head_dim) / head_dim / (block_length or self.token_group)
            return 16.0 * words / self.group_size + 16.0 * self.has_factor / head_dim + numbers
        factor = 16.0 * self.has_factor / (block_length or self.token_group)
        return 16.0 * words * -(-head_dim // self.group_size) / head_dim + factor

    def bits_per_value(self, head_dim: int, block_length: int | None = None) -> float:
        """Bits of a stored value, metadata included; 16 for what is stored as it is. Arguments as above."""
        return self.code_bits(head_dim) + self.metadata_bits(head_dim, block_length)

    def __str__(self) -> str:
        if not self.is_quantized:
            return "16-bit, as is"
        parts = [f"{self.nbits}-bit {self.granularity}", f"group {self.group_size}"]
        parts += [f"{self.promoted:.1%} of channels {self.nbits + EXTRA_BITS}-bit"] * bool(self.promoted)
        parts += [self.method] * (self.method != "affine")
        parts += ["symmetric"] * self.symmetric
        parts += [f"clip {self.clip}"] * (self.clip != "minmax")
        parts += [self.rotation] * (self.rotation != "none")
        return " ".join(parts)
