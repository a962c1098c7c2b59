"""What single model calls of an evaluation cost and held, and what all of them say together."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from kvquant_hf.config import KVQuantConfig
from kvquant_hf.memory import MemoryReport


@dataclass(frozen=True)
class CallRecord:
    """One `generate` call, or one batch of continuations whose log-likelihood was asked for.

    Attributes:
        report: What its cache held at the end.
        new_tokens: Tokens generated or scored, over all rows; of a generated row, padding after its end included.
        seconds: Duration, prefill included.
        kind: `generate` or `loglikelihood`.
        padding: Padding tokens before each prompt of the batch.
    """

    report: MemoryReport
    new_tokens: int
    seconds: float
    kind: str = "generate"
    padding: tuple[int, ...] = (0,)

    @property
    def padded_unequally(self) -> bool:
        """Whether prompts of different lengths shared this batch."""
        return len(set(self.padding)) > 1

    def to_dict(self) -> dict[str, Any]:
        """All fields, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, mapping: Mapping[str, Any]) -> "CallRecord":
        """The record that `to_dict` gave."""
        names = {item.name for item in fields(MemoryReport)}
        report = {name: value for name, value in mapping["report"].items() if name in names}
        return cls(
            MemoryReport(**report),
            mapping["new_tokens"],
            mapping["seconds"],
            mapping["kind"],
            tuple(mapping["padding"]),
        )


def summarize(calls: Sequence[CallRecord]) -> dict[str, Any]:
    """Figures of a whole run.

    Returns:
        `generate_calls`, `loglikelihood_calls`, `quantized_tokens` (longest row of each call, summed),
        `bits_per_value` (bits, all bytes held over all numbers held, at the end of each call), `kv_bytes_largest_call`
        and `kv_bytes_dense_largest_call` (bytes), `new_tokens_per_s` (prefill included) and
        `unequally_padded_calls`. A figure without a call to take it from is `None`.
    """
    stored = sum(call.report.total_bytes for call in calls)
    values = sum(call.report.values for call in calls)
    seconds = sum(call.seconds for call in calls)
    largest = max((call.report for call in calls), key=lambda report: report.total_bytes, default=None)
    return {
        "generate_calls": sum(call.kind == "generate" for call in calls),
        "loglikelihood_calls": sum(call.kind == "loglikelihood" for call in calls),
        "quantized_tokens": sum(call.report.quantized_tokens for call in calls),
        "bits_per_value": 8 * stored / values if values else None,
        "kv_bytes_largest_call": largest.total_bytes if largest else None,
        "kv_bytes_dense_largest_call": largest.dense_bytes if largest else None,
        "new_tokens_per_s": sum(call.new_tokens for call in calls) / seconds if seconds else None,
        "unequally_padded_calls": sum(call.padded_unequally for call in calls),
    }


def cautions(calls: Sequence[CallRecord], config: KVQuantConfig) -> list[str]:
    """What keeps the results of these calls from meaning what they seem to mean, one sentence or two each."""
    if not calls or not config.is_quantized:
        return []
    found = []
    if not any(call.report.quantized_tokens for call in calls):
        found.append(
            "No token was quantized: prompts and answers fit into the sinks and the residual window of "
            f"{config.residual_length} tokens, so these results are those of the dense cache."
        )
    unequal = [call for call in calls if call.padded_unequally]
    if unequal:
        most = max(max(call.padding) for call in unequal)
        found.append(
            f"{len(unequal)} of {len(calls)} batches held prompts of different lengths (up to {most} padding tokens). "
            "Padding moves the borders of quantized blocks, so results depend a little on which prompts share a "
            "batch: compare runs of one batch size only, or use batch_size=1."
        )
    return found
