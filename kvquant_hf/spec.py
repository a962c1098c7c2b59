"""How one kind of tensor, keys or values, is stored."""

from dataclasses import dataclass

from kvquant_hf.checks import check_ascending, check_choice, check_permutation

NBITS = (2, 3, 4, 8, 16)
GROUP_SIZES = (16, 32, 64, 128)
GRANULARITIES = ("per_channel", "per_token")
ROPE_ORDERS = ("pre", "post")
ROTATIONS = ("none", "hadamard", "hadamard_signs", "grouped_heads")
CLIPS = ("minmax", "mse")
METADATA_NBITS = (8, 16)
SHARED_GROUPS = (1, 2, 4)
SHARED_PARAMETERS = ("scale", "zero_point")
PROMOTED_SHARES = (0.0, 0.125, 0.25, 0.5)
OUTLIER_SHARES = (0.0, 0.005, 0.01, 0.02)
_PROMOTED_NBITS = (2, 3, 4)
# Bits that a promoted channel has more than the others.
EXTRA_BITS = 2
METHODS = ("affine", "innerq", "variance_normalized", "turboquant", "turboquant_prod")
# Tables of levels (`kvquant_hf.quantizers.levels`) and the bits of their codes; evenly spaced levels need none.
LEVELS_NBITS = {"gaussian": (2, 3, 4), "laplace": (2, 3, 4), "e4m3": (8,), "e5m2": (8,), "e2m1": (4,)}
LEVELS = ("uniform", *LEVELS_NBITS)
# Bits of codes whose levels are listed one by one, and the largest such level: a group's range is -1 to 1.
TABLE_NBITS, TABLE_LIMIT = (2, 3, 4), 2.0
# Methods that treat a block as a tile of tokens and channels, and store a factor along its rows.
_TILE_METHODS = ("variance_normalized",)
# Methods that keep norms of tokens in the Hadamard basis.
NORM_METHODS = ("turboquant", "turboquant_prod")
# Tokens that share the factors of InnerQ's keys, at most, and in groups: 16 bits a channel, spread over them.
_INNER_TOKENS, _INNER_GROUPS = 128, 4


def channel_number_bits(head_dim: int) -> int:
    """Bits in which the number of a promoted channel is stored."""
    return 8 if head_dim <= 2**8 else 16


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
            least `group_size` tokens. `innerq` (InnerQ, arXiv 2602.23200) is meant for keys `per_token`, whose
            channels it normalizes in blocks of four times `group_size` tokens (at most 128), with values
            `per_channel`; its codes are a sign and a magnitude if `symmetric`, else each group is the better of that
            and codes with a zero point (the paper's hybrid). `turboquant` keeps the norm of each token, with Gaussian
            levels in the Hadamard basis (TurboQuant, arXiv 2504.19874); its settings are those of the presets of that
            name. `turboquant_prod`, with the same settings, spends one of the bits on the sign of a random projection
            of the residual: inner products have no bias, but more variance (its `prod` variant, with QJL).
        symmetric: Codes evenly about zero, at odd multiples of half a scale, with no zero point to store. Pays for
            values in the Hadamard basis, whose mean is zero. `innerq` has its own: zero is one of the levels.
        clip: Range of a group: its minimum and maximum (`minmax`), or the shrunken range of least squared error
            (`mse`).
        promoted: Share of the channels of a block that get two more bits, those of widest range (Kitty, arXiv
            2511.18643). For affine, asymmetric codes per channel; without effect on codes of 8 bits.
        outliers: Share of the entries of a block that are kept exact beside the codes and widen no range: those whose
            absence narrows the ranges of the block most (KVQuant, arXiv 2401.18079 section 3.4). For the method
            `affine`, with levels of any kind, without promoted channels.
        metadata_nbits: Bits per scale and per zero point; 8 bits are relative to numbers that the groups of a block
            and head share (`kvquant_hf.quantizers.second_level`). For affine codes of even levels, and for symmetric
            ones of `e2m1`, whose scales are then numbers of `e4m3` (NVFP4, `kvquant_hf.quantizers.nvfp4`). Bytes have
            no NaN: what is not finite becomes finite numbers of no meaning, in its token or channel alone.
        centered: Whether `method: variance_normalized` takes the mean of each group out before it normalizes, and
            stores it in place of the zero point (KVarN's optional centering). For asymmetric codes, which are even
            about that mean then.
        levels: What codes stand for before scale and zero point: evenly spaced numbers (`uniform`), the levels of
            least squared error for a `gaussian` or `laplace` density (2 to 4 bits), or the numbers of a floating-point
            format, `e4m3` and `e5m2` (8 bits; the latter loses), `e2m1` (4 bits). A tuple (in YAML a list) of
            `2 ** nbits` ascending numbers is a table of its own (2 to 4 bits), in units in which the range of a group
            goes from -1 to 1: KVQuant's calibrated `nuq` levels (section 3.3), which `scripts/calibrate.py levels`
            finds. Such a table belongs to the settings and is counted in no bits per value: 16 numbers a layer and
            side at most.
            `symmetric` drops the zero point of any of them.
        shared_groups: Consecutive groups of a row that share one of their two parameters; the last ones of a row may
            be fewer (`kvquant_hf.quantizers.shared_groups`). For affine, asymmetric codes of even levels with
            metadata of 16 bits, without outliers and promoted channels. A block of codes per channel has tokens for
            all groups that share. Metadata of 8 bits is better at the same size (docs/results.md).
        shared_parameter: What they share: the `scale`, which leaves constant groups exact, or the `zero_point`, which
            is better for values.
        channel_order: In which order a rotation takes the channels of each head: a tuple (in YAML a list) of the
            numbers from 0 to the head size less one, or an empty one for the order they have. A Hadamard matrix mixes
            neighbours in its first steps, so that wide channels next to each other give few different sums, and
            narrower ranges (in the spirit of RotateKV's reordering; `scripts/calibrate.py order` finds one). With a
            rotation only. It belongs to the settings and is counted in no bits per value.
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
    outliers: float = 0.0
    metadata_nbits: int = 16
    levels: str | tuple[float, ...] = "uniform"
    centered: bool = False
    shared_groups: int = 1
    shared_parameter: str = "scale"
    channel_order: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_choice("nbits", self.nbits, NBITS)
        check_choice("granularity", self.granularity, GRANULARITIES)
        check_choice("group_size", self.group_size, GROUP_SIZES)
        check_choice("rope", self.rope, ROPE_ORDERS)
        check_choice("rotation", self.rotation, ROTATIONS)
        object.__setattr__(self, "channel_order", check_permutation("channel_order", self.channel_order))
        check_choice("method", self.method, METHODS)
        check_choice("symmetric", self.symmetric, (False, True))
        check_choice("centered", self.centered, (False, True))
        check_choice("clip", self.clip, CLIPS)
        for name in ("promoted", "outliers"):
            share = getattr(self, name)
            if share == 0 and not isinstance(share, bool):
                object.__setattr__(self, name, 0.0)  # YAML reads 0 as an integer
        check_choice("promoted", self.promoted, PROMOTED_SHARES)
        check_choice("outliers", self.outliers, OUTLIER_SHARES)
        check_choice("metadata_nbits", self.metadata_nbits, METADATA_NBITS)
        check_choice("shared_groups", self.shared_groups, SHARED_GROUPS)
        check_choice("shared_parameter", self.shared_parameter, SHARED_PARAMETERS)
        if isinstance(self.levels, (list, tuple)):
            object.__setattr__(self, "levels", check_ascending("levels", self.levels, TABLE_LIMIT))
        else:
            check_choice("levels", self.levels, LEVELS)
        self._check_goes_with("channel_order", (), {"rotation": ROTATIONS[1:]})
        affine: dict[str, tuple[object, ...]] = {"method": ("affine",), "levels": ("uniform",)}
        channels = {"granularity": ("per_channel",), "symmetric": (False,)}
        self._check_goes_with("promoted", 0, affine | channels)
        self._check_goes_with("centered", False, {"method": ("variance_normalized",), "symmetric": (False,)})
        self._check_goes_with("outliers", 0, {"method": ("affine",), "promoted": (0.0,), "nbits": NBITS[:-1]})
        self._check_goes_with("metadata_nbits", 16, affine | {"levels": ("uniform", "e2m1"), "outliers": (0.0,)})
        whole = {"metadata_nbits": (16,), "promoted": (0.0,), "outliers": (0.0,)}
        self._check_goes_with("shared_groups", 1, affine | {"symmetric": (False,)} | whole)
        self._check_goes_with("shared_parameter", "scale", {"shared_groups": SHARED_GROUPS[1:]})
        if self.is_quantized:
            self._check_levels()

    def _check_levels(self) -> None:
        needs: dict[str, tuple[object, ...]] = {}
        if self.method in NORM_METHODS:
            needs = {"levels": ("gaussian",), "granularity": ("per_token",), "symmetric": (True,)}
            needs |= {"rotation": ("hadamard",), "nbits": LEVELS_NBITS["gaussian"]}
            why = f"`method={self.method!r}`"
        elif self.levels != "uniform":
            needs = {"nbits": self.levels_nbits, "method": ("affine",)}
            why = f"`levels={self.levels!r}`"
            if self.metadata_nbits == 8:
                needs, why = needs | {"symmetric": (True,)}, f"{why} and `metadata_nbits=8`"
        for name, choices in needs.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"`{name}` must be one of {choices} with {why}, got {getattr(self, name)!r}.")
        if isinstance(self.levels, tuple) and len(self.levels) != 2**self.nbits:
            raise ValueError(
                f"`levels` must be one of {LEVELS} or 2 ** nbits = {2**self.nbits} numbers, got {len(self.levels)}: "
                f"{self.levels}."
            )

    @property
    def levels_nbits(self) -> tuple[int, ...]:
        """Bits of codes that the levels serve."""
        if isinstance(self.levels, tuple):
            return TABLE_NBITS
        return LEVELS_NBITS.get(self.levels, NBITS[:-1])

    @property
    def levels_name(self) -> str:
        """Name of the levels, `table` for those that are listed."""
        return self.levels if isinstance(self.levels, str) else "table"

    def _check_goes_with(self, setting: str, default: object, allowed: dict[str, tuple[object, ...]]) -> None:
        """Raise if a setting is not its default and another one is none of those that it goes with."""
        chosen = getattr(self, setting)
        if chosen == default:
            return
        for name, choices in allowed.items():
            if getattr(self, name) not in choices:
                raise ValueError(
                    f"`{setting}` must be {default} unless `{name}` is one of {choices}, got {setting}={chosen} and "
                    f"{name}={getattr(self, name)!r}."
                )

    @property
    def promotes(self) -> bool:
        """Whether some channels have more bits than the others."""
        return self.promoted > 0 and self.nbits in _PROMOTED_NBITS

    def num_promoted(self, head_dim: int) -> int:
        """Channels of a head that get more bits: an even number, at least two if any."""
        return 2 * max(1, int(self.promoted * head_dim / 2)) if self.promotes else 0

    def num_outliers(self, entries: int) -> int:
        """Entries kept exact in a block of one head that has so many: at least one if any."""
        return max(1, round(self.outliers * entries)) if self.outliers else 0

    @property
    def has_second_level(self) -> bool:
        """Whether scales and zero points are bytes (`QuantizedGroups.second_level`)."""
        return self.is_quantized and self.metadata_nbits == 8

    def num_listed(self, num_groups: int) -> int:
        """Zero points that a block of so many groups keeps in 16 bits where the others take 8."""
        return 0 if self.symmetric else max(1, num_groups // 32)

    @property
    def shares(self) -> bool:
        """Whether groups share a parameter."""
        return self.is_quantized and self.shared_groups > 1

    def num_stored(self, parameter: str, num_groups: int) -> int:
        """Numbers that a row of so many groups stores of a parameter, `scale` or `zero_point`."""
        sharing = self.shared_groups if parameter == self.shared_parameter else 1
        return -(-num_groups // sharing) * (self.numbers_per_group if parameter == "scale" else 1)

    @property
    def numbers_per_group(self) -> int:
        """Numbers of a group in `QuantizedGroups.scale`: besides the scale, `turboquant_prod` has a norm."""
        return 2 if self.is_quantized and self.method == "turboquant_prod" else 1

    @property
    def is_quantized(self) -> bool:
        """Whether codes are stored (fewer than 16 bits)."""
        return self.nbits < 16

    @property
    def token_group(self) -> int:
        """Consecutive tokens that must be quantized together."""
        if self._normalizes_channels:
            return max(self.group_size, min(_INNER_TOKENS, _INNER_GROUPS * self.group_size))
        if self.granularity == "per_channel" or self.method in _TILE_METHODS:
            return self.group_size * self.shared_groups
        return 1

    @property
    def _normalizes_channels(self) -> bool:
        return self.method == "innerq" and self.granularity == "per_token"

    @property
    def has_factor(self) -> bool:
        """Whether blocks have a factor besides scales and zero points (`QuantizedGroups.factor`)."""
        return self.is_quantized and (self.method in _TILE_METHODS or self._normalizes_channels)

    def code_bits(self, head_dim: int) -> float:
        """Bits per value of the codes, mean over channels."""
        return self.nbits + EXTRA_BITS * self.num_promoted(head_dim) / head_dim

    def metadata_bits(self, head_dim: int, block_length: int | None = None) -> float:
        """Bits per value spent on scales, zero points and factors, numbers of promoted channels and outliers.

        An outlier takes 16 bits for its value and 16 for its position.

        Args:
            head_dim: Size of a key or value.
            block_length: Tokens of a block; the shortest that serves by default.
        """
        if not self.is_quantized:
            return 0.0
        words = (self.numbers_per_group + (not self.symmetric)) * self.metadata_nbits / 16
        length = block_length or self.token_group
        entries = head_dim * length
        shared = 32.0 * self.num_outliers(entries) / entries
        if self.has_second_level:
            length = block_length or max(self.token_group, 32)
            rows, row = (head_dim, length) if self.granularity == "per_channel" else (length, head_dim)
            shared += 16.0 * (1 + self.num_listed(rows * -(-row // self.group_size))) / (rows * row)
        if self.shares:
            row = length if self.granularity == "per_channel" else head_dim
            groups = -(-row // self.group_size)
            return 16.0 * sum(self.num_stored(name, groups) for name in SHARED_PARAMETERS) / row
        if self.granularity == "per_channel":
            numbers = channel_number_bits(head_dim) * self.num_promoted(head_dim) / head_dim
            numbers /= block_length or self.token_group
            return 16.0 * words / self.group_size + 16.0 * self.has_factor / head_dim + numbers + shared
        factor = 16.0 * self.has_factor / (block_length or self.token_group)
        return 16.0 * words * -(-head_dim // self.group_size) / head_dim + factor + shared

    def bits_per_value(self, head_dim: int, block_length: int | None = None) -> float:
        """Bits of a stored value, metadata included; 16 for what is stored as it is. Arguments as above."""
        return self.code_bits(head_dim) + self.metadata_bits(head_dim, block_length)

    def __str__(self) -> str:
        if not self.is_quantized:
            return "16-bit, as is"
        parts = [f"{self.nbits}-bit {self.granularity}", f"group {self.group_size}"]
        parts += [f"{self.promoted:.1%} of channels {self.nbits + EXTRA_BITS}-bit"] * self.promotes
        parts += [f"{self.outliers:.1%} of entries exact"] * bool(self.outliers)
        parts += [self.method] * (self.method != "affine")
        parts += [f"{self.levels_name} levels"] * (self.levels != "uniform")
        parts += ["symmetric"] * self.symmetric + ["centered"] * self.centered
        parts += [f"clip {self.clip}"] * (self.clip != "minmax")
        parts += [f"{self.metadata_nbits}-bit metadata"] * self.has_second_level
        shared = self.shared_parameter.replace("_", " ")
        parts += [f"{self.shared_groups} groups share a {shared}"] * self.shares
        parts += [self.rotation] * (self.rotation != "none") + ["of ordered channels"] * bool(self.channel_order)
        return " ".join(parts)
