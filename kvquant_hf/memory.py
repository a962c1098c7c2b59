"""How many bytes a cache holds, and for what."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from kvquant_hf.buffers import storage_bytes
from kvquant_hf.layer import QuantLayer
from kvquant_hf.other_layers import tensors_of


@dataclass(frozen=True)
class MemoryReport:
    """Bytes of a cache by part. `str()` gives a table.

    Under tensor parallelism each process holds some heads of every layer, and its report counts these alone.

    Attributes:
        codes: Packed codes (and unquantized blocks where `nbits` is 16), bytes.
        scales: Scales, and factors and outliers of methods that have them, bytes.
        zero_points: Zero points, bytes.
        sinks: Attention sinks, bytes.
        residual: Exact tokens of the residual windows, and queries that wait for a guard's decision, bytes.
        unused: Capacity held for tokens to come, bytes.
        other_layers: Layers that are not quantized (sliding windows, states), bytes.
        dense_bytes: What `DynamicCache` would hold for the same tokens, bytes.
        values: Numbers (key and value elements) held.
        quantized_values: Numbers held as codes.
        quantized_bytes: Codes and their scales and zero points, bytes.
        tokens: Tokens stored per row.
        quantized_tokens: Of these, held as codes, in the layer that holds most.
        shards: Processes that the heads are split over, of which this report counts one.
        guarded_layers: Layers whose keys a guard stores in more bits than the settings say.
    """

    codes: int
    scales: int
    zero_points: int
    sinks: int
    residual: int
    unused: int
    other_layers: int
    dense_bytes: int
    values: int
    quantized_values: int
    quantized_bytes: int
    tokens: int
    quantized_tokens: int
    shards: int = 1
    guarded_layers: int = 0

    @classmethod
    def joined(cls, reports: Sequence["MemoryReport"]) -> "MemoryReport":
        """The whole cache, from the reports of all processes of a tensor-parallel model.

        Args:
            reports: One of each process; `torch.distributed.all_gather_object` gets them.

        Raises:
            ValueError: There is none, or they differ in the number of tokens, as those of one cache do not.
        """
        lengths = {(report.tokens, report.quantized_tokens) for report in reports}
        if len(lengths) != 1:
            raise ValueError(
                f"`reports` must be those of one cache, got (tokens, quantized tokens) {sorted(lengths)}."
            )
        tokens, quantized_tokens = lengths.pop()
        once = ("tokens", "quantized_tokens", "guarded_layers", "shards")
        counted = [item.name for item in fields(cls) if item.name not in once]
        sums = {name: sum(getattr(report, name) for report in reports) for name in counted}
        # Each process decides by its own heads; no fewer layers than this are guarded in one of them.
        guarded = max(report.guarded_layers for report in reports)
        return cls(**sums, tokens=tokens, quantized_tokens=quantized_tokens, guarded_layers=guarded)

    @property
    def total_bytes(self) -> int:
        """All bytes held."""
        return sum(getattr(self, name) for name in _PARTS)

    @property
    def bits_per_value(self) -> float:
        """Everything held over the numbers held, bits; 0 for an empty cache."""
        return 8 * self.total_bytes / self.values if self.values else 0.0

    @property
    def bits_per_value_quantized(self) -> float:
        """The same for the part held as codes, scales and zero points included; 0 where nothing is."""
        return 8 * self.quantized_bytes / self.quantized_values if self.quantized_values else 0.0

    @property
    def ratio(self) -> float:
        """Bytes held over those of the dense cache; 0 for an empty cache."""
        return self.total_bytes / self.dense_bytes if self.dense_bytes else 0.0

    def to_dict(self) -> dict[str, float]:
        """All figures by name, for JSON."""
        stored: dict[str, float] = {item.name: getattr(self, item.name) for item in fields(self)}
        derived = ("total_bytes", "bits_per_value", "bits_per_value_quantized", "ratio")
        return stored | {name: getattr(self, name) for name in derived}

    def __str__(self) -> str:
        rows = [(name.replace("_", " "), getattr(self, name)) for name in _PARTS]
        rows += [("total", self.total_bytes), ("dense cache", self.dense_bytes)]
        lines = [f"{'part':<14}{'bytes':>16}{'share':>9}"]
        for name, size in rows:
            share = f"{size / self.total_bytes:>9.1%}" if self.total_bytes and name != "dense cache" else f"{'':>9}"
            lines.append(f"{name:<14}{size:>16,}{share}")
        lines.append(
            f"{self.tokens:,} tokens, {self.quantized_tokens:,} as codes; {self.bits_per_value:.2f} bits per value "
            f"({self.bits_per_value_quantized:.2f} in the quantized part); {self.ratio:.3f} of the dense cache"
        )
        if self.guarded_layers:
            plural = "s" * (self.guarded_layers > 1)
            lines.append(f"guard: {self.guarded_layers} layer{plural} with wider keys")
        if self.shards > 1:
            lines.append(f"tensor parallel: the share of this process, 1 of {self.shards}")
        return "\n".join(lines)


_PARTS = ("codes", "scales", "zero_points", "sinks", "residual", "unused", "other_layers")


def report_of(layers: Sequence[Any], whole_heads: Mapping[int, int | None]) -> MemoryReport:
    """What the layers of a cache hold.

    Args:
        layers: Quantized ones and others; at least one is quantized.
        whole_heads: Key/value heads of the whole model, by the index of each quantized layer, as far as known.
    """
    parts = dict.fromkeys(_PARTS, 0)
    figures = {"dense_bytes": 0, "values": 0, "quantized_values": 0, "quantized_bytes": 0, "guarded_layers": 0}
    quantized: dict[int, QuantLayer] = {}
    for i, layer in enumerate(layers):
        if isinstance(layer, QuantLayer):
            quantized[i] = layer
            for counted, sizes in zip((parts, figures), layer.memory(), strict=True):
                for name, size in sizes.items():
                    counted[name] += size
        else:
            for tensor in tensors_of(layer):
                parts["other_layers"] += storage_bytes(tensor)
                figures["dense_bytes"] += tensor.numel() * tensor.element_size()
                figures["values"] += tensor.numel()
    # Processes that the heads are split over, as far as the layers show.
    held = {i: layer.num_heads for i, layer in quantized.items() if layer.num_heads}
    splits = [whole // held[i] for i, whole in whole_heads.items() if whole and i in held]
    return MemoryReport(
        **parts,
        **figures,
        tokens=next(iter(quantized.values())).get_seq_length(),
        quantized_tokens=max(layer.quantized_length for layer in quantized.values()),
        shards=max(splits, default=1),
    )
