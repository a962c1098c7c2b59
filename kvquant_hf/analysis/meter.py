"""What is measured for a budget: errors of one layer and side alone, and errors of whole settings."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from kvquant_hf.analysis.allocation import Sensitivities
from kvquant_hf.analysis.attention_error import check_codes_are_read
from kvquant_hf.analysis.candidates import EXACT, SIDES, Candidates
from kvquant_hf.analysis.layer_settings import single_config
from kvquant_hf.analysis.measures import HeadSums
from kvquant_hf.analysis.run import measure_attention, measure_scores
from kvquant_hf.cache import QuantCache
from kvquant_hf.config import KVQuantConfig
from kvquant_hf.eval.score import Protocol, Score
from kvquant_hf.eval.score_store import FileStore

# The errors of `Budget.error_names` and the measures of attention that they are, by side.
ATTENTION_MEASURES = {"key": "attention_kl", "value": "output_error_from_values"}
Settings = Mapping[str, KVQuantConfig]


@dataclass(frozen=True)
class Meter:
    """A model, texts and a way of feeding them.

    Attributes:
        model: Causal language model in eval mode.
        windows: `[N, context]`, what is calibrated on.
        held_out: `[M, context]`, what the result is checked on; `M` may be 0.
        protocol: How windows are fed.
        queries: Queries whose attention is looked at, of each window the last.
        frame: Settings of the cache besides keys and values.
        open_store: Gives the store of what was measured before, for settings by name.
    """

    model: PreTrainedModel
    windows: torch.Tensor
    held_out: torch.Tensor
    protocol: Protocol
    queries: int
    frame: KVQuantConfig
    open_store: Callable[[Settings], FileStore]

    def scores(self, settings: Settings, held_out: bool = False) -> dict[str, Score]:
        """Scores of predictions by name, the dense cache's among them."""
        windows = self.held_out if held_out else self.windows
        store = self.open_store(settings)
        return measure_scores(settings, self.model, windows, self.protocol, store, share_prefill=True)

    def attention(self, settings: Settings) -> dict[str, HeadSums]:
        """Errors of attention by name, over all windows."""
        store = self.open_store(settings)
        found = measure_attention(settings, self.model, self.windows, self.protocol, self.queries, store)
        return {name: HeadSums.total(found[name]) for name in settings}

    def attention_errors(self, config: KVQuantConfig) -> dict[str, float]:
        """`key_kl` and `value_error` of settings, means over heads and layers."""
        if not (config.is_quantized or config.layers):
            return {"key_kl": 0.0, "value_error": 0.0}
        sums = self.attention({"the allocation": config})["the allocation"]
        return {"key_kl": sums.mean(ATTENTION_MEASURES["key"]), "value_error": sums.mean(ATTENTION_MEASURES["value"])}

    def sensitivities(self, candidates: Candidates, of_attention: bool) -> Sensitivities:
        """Errors of each layer, side and candidate alone, all else being exact.

        Args:
            candidates: What is tried.
            of_attention: KL of attention probabilities for keys and relative error of the attention output for values,
                of the layer itself; otherwise the KL of predictions through the cache, for both.

        Raises:
            ValueError: No token of a window would be read from codes.
        """
        for _, _, config in self._one_sided(candidates):
            if config.is_quantized:
                check_codes_are_read(config, self.protocol)
        return self._of_attention(candidates) if of_attention else self._of_predictions(candidates)

    def _one_sided(self, candidates: Candidates) -> list[tuple[str, str, KVQuantConfig]]:
        """One side of all layers quantized: side, candidate and settings."""
        exact = self.frame.replace(key=EXACT, value=EXACT)
        return [
            (side, name, exact.replace(**{side: spec})) for side in SIDES for name, spec in candidates.of(side).items()
        ]

    def _of_predictions(self, candidates: Candidates) -> Sensitivities:
        layers = QuantCache(self.model).quantized_layers
        singles = {
            (side, index, name): single_config(self.frame, index, side, spec)
            for index in layers
            for side in SIDES
            for name, spec in candidates.of(side).items()
            if spec.is_quantized
        }
        scores = self.scores({_single_name(*where): config for where, config in singles.items()})
        return Sensitivities(
            {
                side: {
                    index: {
                        # Rounding makes the KL of nearly equal predictions a little negative.
                        name: max(0.0, scores[_single_name(side, index, name)].kl) if spec.is_quantized else 0.0
                        for name, spec in candidates.of(side).items()
                    }
                    for index in layers
                }
                for side in SIDES
            }
        )

    def _of_attention(self, candidates: Candidates) -> Sensitivities:
        layers = QuantCache(self.model).quantized_layers
        errors: dict[str, dict[int, dict[str, float]]] = {side: {i: {} for i in layers} for side in SIDES}
        settings = self._one_sided(candidates)
        found = self.attention({f"{side} {name}": config for side, name, config in settings if config.is_quantized})
        for side, name, _ in settings:
            sums = found.get(f"{side} {name}")
            by_layer = dict.fromkeys(layers, 0.0)
            if sums is not None:
                by_layer = dict(zip(sums.layers, sums.by_layer(ATTENTION_MEASURES[side]), strict=True))
            for index in layers:
                errors[side][index][name] = max(0.0, by_layer[index])
        return Sensitivities(errors, weight=1 / len(layers))


def _single_name(side: str, index: int, name: str) -> str:
    return f"layer {index}, {side} {name}"
