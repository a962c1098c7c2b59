"""lm-evaluation-harness (0.4.13) with a quantized cache: the model `kvquant`.

Importing this module needs the `eval` extra and makes the model known to lm-eval.
"""

import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lm_eval.api.registry import model_registry
from lm_eval.models.huggingface import HFLM
from tqdm import tqdm

from kvquant_hf._compat import cache_kwargs
from kvquant_hf.cache import QuantCache
from kvquant_hf.config import KVQuantConfig, check_choice
from kvquant_hf.eval.calls import CallRecord, cautions, summarize
from kvquant_hf.eval.journal import ResponseJournal
from kvquant_hf.eval.loglikelihood import (
    MODES,
    batches_of,
    chunked_logits,
    decoded_log_probs,
    gather_targets,
    rows_of,
)
from kvquant_hf.eval.models import resolve_model
from kvquant_hf.eval.settings import parse_quant
from kvquant_hf.eval.squad_metrics import provide_squad_metrics

MODEL_NAME = "kvquant"


class KVQuantLM(HFLM):  # type: ignore[misc]  # lm-eval is not typed
    """A Hugging Face model of lm-eval whose every batch reads a fresh `QuantCache`.

    Args:
        pretrained: Model id, directory, `prepared:NAME` or loaded model.
        quant: What `QuantCache` takes: preset name (also with settings, as in `k2v2,residual_length=64`), YAML path,
            mapping or `KVQuantConfig`.
        loglikelihood_mode: How log-likelihood requests are answered. `decode`: the last context token and the
            continuation are decoded from the stored history. `chunked`: the whole sequence is fed in chunks, each of
            which reads the earlier ones through the cache. `plain`: one forward pass, which reads no cache.
        loglikelihood_step: Tokens of a decode call in mode `decode`.
        loglikelihood_chunk: Tokens of a chunk in mode `chunked`; the first chunk reads no cache.
        kwargs: Arguments of lm-eval's `HFLM`.

    Raises:
        ValueError: A setting is not allowed.
        FileNotFoundError: The prepared model or the YAML file is not there.
    """

    def __init__(
        self,
        pretrained: Any,
        quant: str | Mapping[str, Any] | KVQuantConfig = "k4v4",
        loglikelihood_mode: str = "decode",
        loglikelihood_step: int = 1,
        loglikelihood_chunk: int = 16,
        **kwargs: Any,
    ) -> None:
        check_choice("loglikelihood_mode", loglikelihood_mode, MODES)
        for name, value in (("loglikelihood_step", loglikelihood_step), ("loglikelihood_chunk", loglikelihood_chunk)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"`{name}` must be an integer >= 1, got {value!r}.")
        self.loglikelihood_mode = loglikelihood_mode
        self.loglikelihood_step = loglikelihood_step
        self.loglikelihood_chunk = loglikelihood_chunk
        self.use(quant)
        super().__init__(pretrained=resolve_model(pretrained) if isinstance(pretrained, str) else pretrained, **kwargs)
        provide_squad_metrics()

    def use(self, quant: str | Mapping[str, Any] | KVQuantConfig, journal: Path | None = None) -> None:
        """Go on with another cache configuration; records of earlier calls are forgotten.

        Args:
            quant: As in the constructor.
            journal: Directory in which answers are kept batch by batch, and those of an interrupted run are found.
        """
        self.quant_config = parse_quant(quant) if isinstance(quant, str) else KVQuantConfig.resolve(quant)
        self.calls: list[CallRecord] = []
        self._journal = None
        if journal is not None:
            self._journal = ResponseJournal(journal, self.rank)
            self.calls += self._journal.calls
            self.set_cache_hook(self._journal)

    @property
    def quantized_tokens(self) -> int:
        """Tokens that attention read as codes, longest row of each call, summed over the calls."""
        return sum(call.report.quantized_tokens for call in self.calls)

    # ---- one batch ---------------------------------------------------------------------------------------------

    def _new_cache(self) -> QuantCache:
        # One cache per call: a cache holds one batch of sequences, and a second prompt would be appended to them.
        return QuantCache(self.model, self.quant_config)

    def _begin_batch(self) -> float:
        if self._journal is not None:
            self._journal.commit()  # whatever was noted is of earlier, complete batches
        return time.perf_counter()

    def _record(self, call: CallRecord, answers: int | None) -> None:
        self.calls.append(call)
        if self._journal is not None:
            self._journal.add_call(call, answers)

    def _model_generate(
        self, context: torch.Tensor, max_length: int, stop: list[str], **generation_kwargs: Any
    ) -> torch.Tensor:
        started = self._begin_batch()
        cache = self._new_cache()
        output: torch.Tensor = super()._model_generate(
            context, max_length, stop, **generation_kwargs | cache_kwargs(cache)
        )
        mask = generation_kwargs.get("attention_mask", torch.ones_like(context))
        padding = tuple((mask.shape[1] - mask.sum(1)).tolist())
        new_tokens, seconds = output[:, context.shape[1] :].numel(), time.perf_counter() - started
        self._record(CallRecord(cache.memory_report(), new_tokens, seconds, "generate", padding), len(context))
        return output

    def _model_call(
        self, inps: torch.Tensor, attn_mask: torch.Tensor | None = None, labels: torch.Tensor | None = None
    ) -> torch.Tensor:
        started = self._begin_batch()
        if self.loglikelihood_mode != "chunked" or attn_mask is not None:
            plain: torch.Tensor = super()._model_call(inps, attn_mask, labels)
            return plain
        cache = self._new_cache()
        with self._autocast():
            logits = chunked_logits(self.model, inps, cache, self.loglikelihood_chunk)
        # Padding lies to the right here, where no row attends to it and no block of real tokens is moved. How many
        # requests share these rows is known to lm-eval alone.
        seconds = time.perf_counter() - started
        self._record(CallRecord(cache.memory_report(), inps.numel(), seconds, "loglikelihood", (0,)), None)
        return logits

    def _loglikelihood_tokens(
        self, requests: Any, disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        if self.loglikelihood_mode != "decode":
            answers: list[tuple[float, bool]] = super()._loglikelihood_tokens(requests, disable_tqdm, override_bs)
            return answers
        texts = [text for text, _, _ in requests]
        rows = rows_of([(context, continuation) for _, context, continuation in requests], self.max_length)
        size = override_bs or (self._detect_batch_size() if self.batch_size == "auto" else int(self.batch_size))
        found: dict[int, tuple[float, bool]] = {}
        bar = tqdm(total=len(requests), disable=disable_tqdm or self.rank != 0, desc="Running loglikelihood requests")
        with bar:
            for batch in batches_of(rows, size):
                answered = self._decode_batch(batch)
                found |= answered
                for number, answer in answered.items():
                    if texts[number] is not None:
                        self.cache_hook.add_partial("loglikelihood", texts[number], answer)
                bar.update(len(answered))
        return [found[number] for number in range(len(texts))]

    def _decode_batch(self, rows: list[Any]) -> dict[int, tuple[float, bool]]:
        started = self._begin_batch()
        cache = self._new_cache()
        pad = self.tokenizer.pad_token_id or 0
        with self._autocast():
            pieces = decoded_log_probs(
                self.model, rows, cache, self.loglikelihood_step, pad, getattr(self, "softmax_dtype", None)
            )
            answers = gather_targets(rows, pieces)
        longest = max(len(row.prefill) for row in rows)
        padding = tuple(longest - len(row.prefill) for row in rows)
        scored, seconds = sum(len(row.fed) for row in rows), time.perf_counter() - started
        self._record(CallRecord(cache.memory_report(), scored, seconds, "loglikelihood", padding), len(answers))
        return answers

    def _autocast(self) -> torch.autocast:
        dtype = self.mixed_precision_dtype
        return torch.autocast(device_type=self.device.type, dtype=dtype, enabled=dtype is not None)

    # ---- all requests ------------------------------------------------------------------------------------------

    def _answer(self, kind: str, requests: list[Any], run: Any) -> list[Any]:
        before = len(self.calls)
        answers: list[Any] = run(requests) if self._journal is None else self._journal.complete(kind, requests, run)
        for caution in cautions(self.calls[before:], self.quant_config):
            warnings.warn(caution, stacklevel=3)
        return answers

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Answers of generation requests; warns where no token was ever read from codes or padding was unequal."""
        run = super().generate_until
        return self._answer("generate_until", requests, lambda left: run(left, disable_tqdm=disable_tqdm))

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Log-likelihoods of continuations, read through the cache as `loglikelihood_mode` says."""
        self._warn_of_plain()
        run = super().loglikelihood
        return self._answer("loglikelihood", requests, lambda left: run(left, disable_tqdm=disable_tqdm))

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihoods of whole texts; an interrupted run begins this kind of request anew."""
        self._warn_of_plain()
        run = super().loglikelihood_rolling
        return self._answer("loglikelihood_rolling", requests, lambda left: run(left, disable_tqdm=disable_tqdm))

    def _warn_of_plain(self) -> None:
        if self.quant_config.is_quantized and self.loglikelihood_mode == "plain":
            warnings.warn(
                "With `loglikelihood_mode` 'plain', log-likelihood and multiple-choice requests are one forward pass "
                "that never reads a cache: these numbers are those of the dense model, whatever `quant` says. Use "
                "'decode' or 'chunked'.",
                stacklevel=3,
            )

    def get_model_info(self) -> dict[str, Any]:
        """What lm-eval records about the model, with the resolved cache settings and what the calls did."""
        info: dict[str, Any] = super().get_model_info()
        return info | {
            "kvquant": self.quant_config.to_dict(),
            "kvquant_loglikelihood": {
                "mode": self.loglikelihood_mode,
                "step": self.loglikelihood_step,
                "chunk": self.loglikelihood_chunk,
            },
            "kvquant_stats": summarize(self.calls),
            "kvquant_cautions": cautions(self.calls, self.quant_config),
        }


# An entry point of later lm-eval releases may have registered it already.
if MODEL_NAME not in model_registry:
    model_registry.register(MODEL_NAME)(KVQuantLM)
