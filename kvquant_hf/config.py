"""What a cache stores and how: a `QuantSpec` for keys, one for values, windows, and exceptions by layer."""

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import reduce
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import yaml

from kvquant_hf.checks import check_choice, check_keys, check_length, check_threshold, nearest
from kvquant_hf.spec import QuantSpec

BACKENDS = ("auto", "dense", "torch", "cpu", "triton")

# What single layers may have otherwise.
_OF_LAYERS = ("key", "value", "residual_length", "sink_length", "outlier_guard", "attention_guard")
_RANGE = re.compile(r"^\s*(-?\d+)\s*(?:-\s*(\d+)\s*)?$")
_LAYER_TYPE = re.compile(r"^[a-z][a-z0-9_]*$")
T = TypeVar("T")


@dataclass(frozen=True)
class KVQuantConfig:
    """Settings of a `QuantCache`.

    Attributes:
        key: Storage of the keys; per channel by default.
        value: Storage of the values; per token by default.
        residual_length: Newest tokens kept exact, at least; up to a block less one more may be.
        sink_length: First tokens of each row kept exact (attention sinks, StreamingLLM, arXiv 2309.17453 section 3).
        backend: Who computes attention over the stored history: `auto` picks, `dense` dequantizes everything for each
            call, `torch` is the tiled reference; `cpu` and `triton` are fused kernels.
        layers: Overrides of single layers: a layer index (negative counts from the end), an inclusive range such as
            `"0-3"` or a layer type such as `"full_attention"`, each mapped to partial settings
            (`{"key": {"nbits": 8}, "residual_length": 256}`). Later entries win.
        query_moments: File written by `QueryMoments.save`, by which per-channel keys are rounded where the model's
            queries do not look; `None` rounds every number to its nearest code. In a YAML file the path is relative to
            that file.
        outlier_guard: Keys of a layer get 4 bits instead of 2 or 3, or 8 instead of 4, where the widest channel of
            the first block is more than this many times as wide as the median one (`kvquant_hf.guard`); `None` gives
            all layers what `key` says.
        attention_guard: The same where the first block, stored as `key` says, moves what attention gives to tokens
            shortly before it is quantized by more than this share (0.1: a tenth). With `outlier_guard` both limits
            have to be exceeded.
    """

    key: QuantSpec = field(default_factory=lambda: QuantSpec(granularity="per_channel"))
    value: QuantSpec = field(default_factory=lambda: QuantSpec(granularity="per_token", rope="post"))
    residual_length: int = 128
    sink_length: int = 4
    backend: str = "auto"
    layers: Mapping[int | str, Mapping[str, Any]] = field(default_factory=dict)
    query_moments: str | None = None
    outlier_guard: float | None = None
    attention_guard: float | None = None

    def __post_init__(self) -> None:
        for name in ("key", "value"):
            if not isinstance(getattr(self, name), QuantSpec):
                raise ValueError(f"`{name}` must be a QuantSpec, got {getattr(self, name)!r}.")
        check_length("residual_length", self.residual_length)
        check_length("sink_length", self.sink_length)
        check_choice("backend", self.backend, BACKENDS)
        check_threshold("outlier_guard", self.outlier_guard, 1)
        check_threshold("attention_guard", self.attention_guard, 0)
        if self.query_moments is not None and not isinstance(self.query_moments, str):
            raise ValueError(f"`query_moments` must be the path of a file or None, got {self.query_moments!r}.")
        if not isinstance(self.layers, Mapping):
            raise ValueError(f"`layers` must map layers to overrides, got {self.layers!r}.")
        frozen: dict[int | str, Mapping[str, Any]] = {}
        for selector, override in self.layers.items():
            _check_selector(selector)
            check_keys(f"layers[{selector!r}]", override, _OF_LAYERS)
            frozen[selector] = _freeze(override)
            self._check_override(frozen.values())
        object.__setattr__(self, "layers", MappingProxyType(frozen))

    def _check_override(self, entries: Iterable[Mapping[str, Any]]) -> None:
        """Raise if the last of these overrides goes neither with these settings nor with what all of them make."""
        *_, last = entries = tuple(entries)
        try:
            self._overridden(last)
        except ValueError:
            # It may rest on what an earlier entry sets for the same layers. Where none does, `for_layer` raises.
            try:
                reduce(KVQuantConfig._overridden, entries, self)
            except ValueError:
                pass
            else:
                return
            raise

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, KVQuantConfig):
            return NotImplemented
        # In order: later entries win.
        mine, theirs = ([(key, _thaw(entry)) for key, entry in config.layers.items()] for config in (self, other))
        return self._of_all_layers() == other._of_all_layers() and mine == theirs

    def __hash__(self) -> int:
        return hash((self._of_all_layers(), tuple(self.layers)))

    def _of_all_layers(self) -> tuple[Any, ...]:
        return tuple(getattr(self, item.name) for item in fields(self) if item.name != "layers")

    def __reduce__(self) -> tuple[Any, ...]:
        # A mapping proxy cannot be pickled; the plain form can.
        return KVQuantConfig.from_dict, (self.to_dict(),)

    def __deepcopy__(self, memo: dict[int, Any]) -> "KVQuantConfig":
        return self

    @property
    def block_length(self) -> int:
        """Tokens that are quantized together: the longer token group of keys and values."""
        groups = [spec.token_group for spec in (self.key, self.value) if spec.is_quantized]
        longest = max(groups, default=1)
        return longest if longest > 1 else 32

    @property
    def is_quantized(self) -> bool:
        """Whether keys or values are stored as codes."""
        return self.key.is_quantized or self.value.is_quantized

    @property
    def has_guard(self) -> bool:
        """Whether the first block decides how keys are stored (`kvquant_hf.guard`)."""
        return self.key.nbits < 8 and (self.outlier_guard is not None or self.attention_guard is not None)

    @property
    def asks_queries(self) -> bool:
        """Whether real queries have a say in how keys are stored."""
        return self.has_guard and self.attention_guard is not None

    def without_guards(self) -> "KVQuantConfig":
        """These settings of a single layer with keys stored as `key` says, whatever they look like."""
        return replace(self, outlier_guard=None, attention_guard=None)

    def nominal_bits(self, head_dim: int) -> float:
        """Bits per value of the quantized part, 16-bit metadata included, mean of keys and values."""
        return sum(spec.bits_per_value(head_dim, self.block_length) for spec in (self.key, self.value)) / 2

    def _overridden(self, override: Mapping[str, Any]) -> "KVQuantConfig":
        changes: dict[str, Any] = {"layers": {}}
        for name, setting in override.items():
            if name in ("key", "value"):
                check_keys(name, setting, _names(QuantSpec))
                changes[name] = replace(getattr(self, name), **setting)
            else:
                changes[name] = setting
        return replace(self, **changes)

    def for_layer(self, layer_idx: int, num_layers: int, layer_type: str) -> "KVQuantConfig":
        """The settings of one layer, overrides applied, without `layers`."""
        config = replace(self, layers={})
        for selector, override in self.layers.items():
            if _selects(selector, layer_idx, num_layers, layer_type):
                config = config._overridden(override)
        return config

    def check_layers(self, num_layers: int, layer_types: Iterable[str]) -> None:
        """Raise if an override names a layer or a layer type that a model of `num_layers` layers does not have."""
        kinds = set(layer_types)
        for selector in self.layers:
            if isinstance(selector, str) and _LAYER_TYPE.match(selector):
                if selector not in kinds:
                    raise ValueError(
                        f"`layers` names the layer type {selector!r}, this model has {sorted(kinds)}."
                        f"{nearest(selector, kinds)}"
                    )
            else:
                first, last = _bounds(selector, num_layers)
                if not 0 <= first <= last < num_layers:
                    raise ValueError(
                        f"`layers` names {selector!r}, but this model has layers 0 to {num_layers - 1} "
                        f"(or -{num_layers} to -1)."
                    )

    def replace(self, **changes: Any) -> "KVQuantConfig":
        """A copy with other top-level settings; `key` and `value` also take partial mappings.

        Raises:
            ValueError: A setting is unknown or has a value that is not allowed.
        """
        check_keys("overrides", changes, _names(KVQuantConfig))
        for name in ("key", "value"):
            if isinstance(changes.get(name), Mapping):
                check_keys(name, changes[name], _names(QuantSpec))
                changes[name] = replace(getattr(self, name), **changes[name])
        return replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Plain nested dictionary, as `from_dict` and YAML take it."""
        layers = {selector: _thaw(override) for selector, override in self.layers.items()}
        return {
            "key": asdict(self.key),
            "value": asdict(self.value),
            "residual_length": self.residual_length,
            "sink_length": self.sink_length,
            "backend": self.backend,
            "layers": layers,
            "query_moments": self.query_moments,
            "outlier_guard": self.outlier_guard,
            "attention_guard": self.attention_guard,
        }

    @classmethod
    def from_dict(cls, mapping: Mapping[str, Any]) -> "KVQuantConfig":
        """Settings from a nested mapping; what it leaves out keeps its default. The mapping is not changed.

        A `description` is allowed and ignored.

        Raises:
            ValueError: A key is unknown (the nearest known one is named) or a value is not allowed.
        """
        check_keys("config", mapping, (*_names(cls), "description"))
        return cls().replace(**{name: _thaw(value) for name, value in mapping.items() if name != "description"})

    @classmethod
    def from_yaml(cls, path: str | Path) -> "KVQuantConfig":
        """Settings from a YAML file.

        Raises:
            FileNotFoundError: There is no such file.
            ValueError: The file is not YAML or holds a setting that is unknown or not allowed; the file is named.
        """
        path = Path(path)
        try:
            config = cls.from_dict(yaml.safe_load(path.read_text(encoding="utf-8")))
        except (yaml.YAMLError, UnicodeDecodeError, ValueError) as error:
            raise ValueError(f"{path} is no cache configuration: {error}") from error
        if config.query_moments is None:
            return config
        return replace(config, query_moments=str(path.parent / config.query_moments))

    def to_yaml(self, path: str | Path | None = None) -> str:
        """YAML text of the settings, also written to `path` if one is given, which other files are then named by."""
        settings = self.to_dict()
        if path is not None and self.query_moments is not None:
            settings["query_moments"] = os.path.relpath(self.query_moments, Path(path).parent)
        text = yaml.safe_dump(settings, sort_keys=False)
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text

    @classmethod
    def from_preset(cls, name: str) -> "KVQuantConfig":
        """Settings of a shipped preset, see `list_presets`.

        Raises:
            ValueError: There is no such preset; all are named.
        """
        from kvquant_hf.presets import preset_path

        return cls.from_yaml(preset_path(name))

    @classmethod
    def resolve(cls, quant: "str | Path | Mapping[str, Any] | KVQuantConfig", **overrides: Any) -> "KVQuantConfig":
        """Settings from whatever `QuantCache` takes: preset name, YAML path, mapping or config, plus overrides."""
        if isinstance(quant, KVQuantConfig):
            config = quant
        elif isinstance(quant, Mapping):
            config = cls.from_dict(quant)
        elif isinstance(quant, Path) or (isinstance(quant, str) and quant.endswith((".yaml", ".yml"))):
            config = cls.from_yaml(quant)
        elif isinstance(quant, str):
            config = cls.from_preset(quant)
        else:
            raise ValueError(
                f"`quant` must be a preset name, the path of a YAML file, a mapping or a KVQuantConfig, got {quant!r}."
            )
        return config.replace(**overrides) if overrides else config


def _names(cls: type[Any]) -> tuple[str, ...]:
    return tuple(item.name for item in fields(cls))


def _thaw(value: Any) -> Any:
    return {name: _thaw(item) for name, item in value.items()} if isinstance(value, Mapping) else value


def _freeze(value: Any) -> Any:
    if isinstance(value, Mapping):
        return MappingProxyType({name: _freeze(item) for name, item in value.items()})
    return tuple(value) if isinstance(value, list) else value


def _check_selector(selector: object) -> None:
    is_index = isinstance(selector, int) and not isinstance(selector, bool)
    is_text = isinstance(selector, str) and bool(_RANGE.match(selector) or _LAYER_TYPE.match(selector))
    if not is_index and not is_text:
        raise ValueError(
            "`layers` keys must be a layer index (negative counts from the end), an inclusive range such as '0-3' or "
            f"a layer type, got {selector!r}."
        )


def _bounds(selector: int | str, num_layers: int) -> tuple[int, int]:
    if isinstance(selector, int):
        first = last = selector
    else:
        match = _RANGE.match(selector)
        if match is None:  # checked at construction
            raise ValueError(f"`layers` key {selector!r} is neither an index nor a range.")
        first = int(match[1])
        last = int(match[2]) if match[2] is not None else first
    return (first + num_layers if first < 0 else first), (last + num_layers if last < 0 else last)


def _selects(selector: int | str, layer_idx: int, num_layers: int, layer_type: str) -> bool:
    if isinstance(selector, str) and _LAYER_TYPE.match(selector):
        return selector == layer_type
    first, last = _bounds(selector, num_layers)
    return first <= layer_idx <= last
