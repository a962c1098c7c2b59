"""How one kind of tensor, keys or values, is stored."""

from dataclasses import dataclass

from kvquant_hf.checks import check_choice

NBITS = (2, 3, 4, 8, 16)
GROUP_SIZES = (16, 32, 64, 128)
GRANULARITIES = ("per_channel", "per_token")
ROPE_ORDERS = ("pre", "post")
ROTATIONS = ("none", "hadamard")
CLIPS = ("minmax", "mse")
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
            undoes it on reading (QuaRot, arXiv 2404.00456 section 4).
        method: Quantizer, a name in `kvquant_hf.quantizers.QUANTIZERS`: `affine`, or `variance_normalized`, which
            first brings channels and tokens of a tile to equal spread (KVarN, arXiv 2606.03458). Its tiles have at
            least `group_size` tokens.
        symmetric: Codes evenly about zero, at odd multiples of half a scale, with no zero point to store. Pays for
            values in the Hadamard basis, whose mean is zero.
        clip: Range of a group: its minimum and maximum (`minmax`), or the shrunken range of least squared error
            (`mse`).
    """

    nbits: int = 4
    granularity: str = "per_channel"
    group_size: int = 32
    rope: str = "pre"
    rotation: str = "none"
    method: str = "affine"
    symmetric: bool = False
    clip: str = "minmax"

    def __post_init__(self) -> None:
        check_choice("nbits", self.nbits, NBITS)
        check_choice("granularity", self.granularity, GRANULARITIES)
        check_choice("group_size", self.group_size, GROUP_SIZES)
        check_choice("rope", self.rope, ROPE_ORDERS)
        check_choice("rotation", self.rotation, ROTATIONS)
        check_choice("method", self.method, METHODS)
        check_choice("symmetric", self.symmetric, (False, True))
        check_choice("clip", self.clip, CLIPS)

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

    def metadata_bits(self, head_dim: int, block_length: int | None = None) -> float:
        """Bits per value spent on 16-bit scales, zero points and factors.

        Args:
            head_dim: Size of a key or value.
            block_length: Tokens of a block; the shortest that serves by default.
        """
        if not self.is_quantized:
            return 0.0
        words = 1 if self.symmetric else 2
        if self.granularity == "per_channel":
            return 16.0 * words / self.group_size + 16.0 * self.has_factor / head_dim
        factor = 16.0 * self.has_factor / (block_length or self.token_group)
        return 16.0 * words * -(-head_dim // self.group_size) / head_dim + factor

    def __str__(self) -> str:
        if not self.is_quantized:
            return "16-bit, as is"
        parts = [f"{self.nbits}-bit {self.granularity}", f"group {self.group_size}"]
        parts += [self.method] * (self.method != "affine")
        parts += ["symmetric"] * self.symmetric
        parts += [f"clip {self.clip}"] * (self.clip != "minmax")
        parts += [self.rotation] * (self.rotation != "none")
        return " ".join(parts)
