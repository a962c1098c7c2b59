"""lm-evaluation-harness (0.4.13) with a quantized cache: the model `kvquant`.

Importing this module needs the `eval` extra and makes the model known to lm-eval.
"""

import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from lm_eval.api.registry import model_registry
from lm_eval.models.huggingface import HFLM

from kvquant_hf._compat import cache_kwargs
from kvquant_hf.cache import QuantCache
from kvquant_hf.config import KVQuantConfig
from kvquant_hf.memory import MemoryReport

MODEL_NAME = "kvquant"


@dataclass(frozen=True)
class CallRecord:
    """One `generate` call.

    Attributes:
        report: What its cache held at the end.
        new_tokens: Tokens generated, over all rows, padding after the end of a row included.
        seconds: Duration, prefill included.
    """

    report: MemoryReport
    new_tokens: int
    seconds: float


class KVQuantLM(HFLM):  # type: ignore[misc]  # lm-eval is not typed
    """A Hugging Face model of lm-eval whose `generate` calls use a fresh `QuantCache` each.

    Args:
        pretrained: Model id, directory or loaded model.
        quant: What `QuantCache` takes: preset name, YAML path, mapping or `KVQuantConfig`.
        kwargs: Arguments of lm-eval's `HFLM`.
    """

    def __init__(
        self, pretrained: Any, quant: str | Mapping[str, Any] | KVQuantConfig = "k4v4", **kwargs: Any
    ) -> None:
        self.quant_config = KVQuantConfig.resolve(quant)
        self.calls: list[CallRecord] = []
        self._warned = False
        super().__init__(pretrained=pretrained, **kwargs)

    @property
    def quantized_tokens(self) -> int:
        """Tokens that attention read as codes, longest row of each call, summed over the calls."""
        return sum(call.report.quantized_tokens for call in self.calls)

    def _model_generate(
        self, context: torch.Tensor, max_length: int, stop: list[str], **generation_kwargs: Any
    ) -> torch.Tensor:
        # One cache per call: a cache holds one batch of sequences, and a second prompt would be appended to them.
        cache = QuantCache(self.model, self.quant_config)
        started = time.perf_counter()
        output: torch.Tensor = super()._model_generate(
            context, max_length, stop, **generation_kwargs | cache_kwargs(cache)
        )
        new_tokens = output.shape[0] * (output.shape[1] - context.shape[1])
        self.calls.append(CallRecord(cache.memory_report(), new_tokens, time.perf_counter() - started))
        return output

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Answers of generation requests; warns where no token was ever read from codes."""
        before = len(self.calls)
        answers: list[str] = super().generate_until(requests, disable_tqdm=disable_tqdm)
        calls = self.calls[before:]
        if self.quant_config.is_quantized and calls and not any(call.report.quantized_tokens for call in calls):
            warnings.warn(
                "No token was quantized: prompts and answers fit into the sinks and the residual window of "
                f"{self.quant_config.residual_length} tokens, so these results are those of the dense cache.",
                stacklevel=2,
            )
        return answers

    def _loglikelihood_tokens(self, requests: Any, *args: Any, **kwargs: Any) -> Any:
        if self.quant_config.is_quantized and not self._warned:
            self._warned = True
            warnings.warn(
                "Log-likelihood and multiple-choice requests are one forward pass that never reads a cache: these "
                "results are those of the dense model, whatever `quant` says. Use generation tasks.",
                stacklevel=2,
            )
        return super()._loglikelihood_tokens(requests, *args, **kwargs)

    def get_model_info(self) -> dict[str, Any]:
        """What lm-eval records about the model, with the resolved cache settings and what the calls did."""
        info: dict[str, Any] = super().get_model_info()
        seconds = sum(call.seconds for call in self.calls)
        stored = sum(call.report.total_bytes for call in self.calls)
        values = sum(call.report.values for call in self.calls)
        return info | {
            "kvquant": self.quant_config.to_dict(),
            "kvquant_stats": {
                "generate_calls": len(self.calls),
                "quantized_tokens": self.quantized_tokens,
                "bits_per_value": 8 * stored / values if values else None,
                "kv_bytes_largest_call": max((call.report.total_bytes for call in self.calls), default=None),
                "new_tokens_per_s": sum(call.new_tokens for call in self.calls) / seconds if seconds else None,
            },
        }


# An entry point of later lm-eval releases may have registered it already.
if MODEL_NAME not in model_registry:
    model_registry.register(MODEL_NAME)(KVQuantLM)
