"""lm-evaluation-harness (0.4.13) with a quantized cache: the model `kvquant`.

Importing this module needs the `eval` extra and makes the model known to lm-eval.
"""

import time
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from lm_eval.api.registry import model_registry
from lm_eval.models.huggingface import HFLM
from tqdm import tqdm

from kvquant_hf._compat import cache_kwargs
from kvquant_hf.cache import QuantCache
from kvquant_hf.checks import check_choice
from kvquant_hf.config import KVQuantConfig
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
from kvquant_hf.eval.ranks import Ranks, generation_batches, groups_of_context, start_processes
from kvquant_hf.eval.settings import parse_quant
from kvquant_hf.eval.squad_metrics import provide_squad_metrics
from kvquant_hf.memory import MemoryReport
from kvquant_hf.query_moments import settings_by_content

MODEL_NAME = "kvquant"


class KVQuantLM(HFLM):  # type: ignore[misc]  # lm-eval is not typed
    """A Hugging Face model of lm-eval whose every batch reads a fresh `QuantCache`.

    Started by `torchrun` or `accelerate launch`, the processes share the batches, or hold the model together where
    `tp_plan` is given; all of them return all answers.

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
        self.ranks = Ranks()
        self.use(quant)
        if kwargs.get("device_map") is not None and not kwargs.get("parallelize"):
            raise ValueError(
                "`device_map` needs `parallelize=True`: without it lm-eval loads the model on one device."
            )
        split_model = kwargs.get("tp_plan") is not None or (getattr(pretrained, "tp_size", None) or 1) > 1
        if not split_model:  # else Transformers has connected the processes, or will
            start_processes(str(getattr(pretrained, "device", kwargs.get("device") or "cuda")))
        super().__init__(pretrained=resolve_model(pretrained) if isinstance(pretrained, str) else pretrained, **kwargs)
        self.ranks = Ranks.current(split_model)
        if self.ranks.size > 1 and self.batch_size == "auto":
            raise ValueError("`batch_size` must be a number where several processes run, got 'auto'.")
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
        if journal is None:
            return
        if self.ranks.first or self.ranks.shares:
            self._journal = ResponseJournal(journal, self.ranks.rank)
            self.set_cache_hook(self._journal)
        self.calls += self.ranks.broadcast(self._journal.calls if self._journal is not None else [])

    @property
    def rank(self) -> int:
        """0 in every process: lm-eval is to ask each for all requests, see `kvquant_hf.eval.ranks`."""
        return 0

    @property
    def world_size(self) -> int:
        """1, for the same reason."""
        return 1

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
        if self.ranks.split_model:
            call = replace(call, report=MemoryReport.joined(self.ranks.gather(call.report)))
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
            quiet = disable_tqdm or not self.ranks.first
            answers: list[tuple[float, bool]] = super()._loglikelihood_tokens(requests, quiet, override_bs)
            return answers
        texts = [text for text, _, _ in requests]
        rows = rows_of([(context, continuation) for _, context, continuation in requests], self.max_length)
        size = override_bs or (self._detect_batch_size() if self.batch_size == "auto" else int(self.batch_size))
        # lm-eval names a batch size for windows of whole texts alone, and these are shared text by text.
        ranks = self.ranks if override_bs is None else Ranks()
        found: dict[int, tuple[float, bool]] = {}
        batches = ranks.mine(list(batches_of(rows, size)))
        total = sum(len(row.targets) for batch in batches for row in batch)
        quiet = disable_tqdm or not self.ranks.first
        with tqdm(total=total, disable=quiet, desc="Running loglikelihood requests") as bar:
            for batch in batches:
                answered = self._decode_batch(batch)
                found |= answered
                for number, answer in answered.items():
                    if texts[number] is not None:
                        self.cache_hook.add_partial("loglikelihood", texts[number], answer)
                bar.update(len(answered))
        found = {number: answer for part in ranks.gather(found) for number, answer in part.items()}
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
        """Answers found in the journal, and those that this process and the others give."""
        before = len(self.calls)
        answers = [None] * len(requests) if self._journal is None else self._journal.find(kind, requests)
        # What the first process read counts: others may have read what was written since.
        answers = self.ranks.broadcast(answers)
        left = [i for i, answer in enumerate(answers) if answer is None]
        mine = self._share(kind, requests, left)
        new = run([requests[i] for i in mine]) if mine else []
        if self._journal is not None:
            self._journal.commit()
        for part in self.ranks.gather(dict(zip(mine, new, strict=True))):
            for i, answer in part.items():
                answers[i] = answer
        if self.ranks.shares:
            self.calls[before:] = [call for part in self.ranks.gather(self.calls[before:]) for call in part]
        for caution in cautions(self.calls[before:], self.quant_config) if self.ranks.first else ():
            warnings.warn(caution, stacklevel=3)
        return answers

    def _share(self, kind: str, requests: list[Any], left: list[int]) -> list[int]:
        """Which of the requests `left` this process passes on to lm-eval."""
        if not self.ranks.shares or (kind == "loglikelihood" and self.loglikelihood_mode == "decode"):
            return left  # batches of decoded rows are shared where they are formed, in `_loglikelihood_tokens`
        arguments = [requests[i].args for i in left]
        if kind == "generate_until":
            batches = generation_batches(arguments, int(self.batch_size), self.tok_encode)
        else:
            batches = groups_of_context([context for context, *_ in arguments])
        return [left[i] for batch in self.ranks.mine(batches) for i in batch]

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Answers of generation requests; warns where no token was ever read from codes or padding was unequal."""
        run, quiet = super().generate_until, disable_tqdm or not self.ranks.first
        return self._answer("generate_until", requests, lambda left: run(left, disable_tqdm=quiet))

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Log-likelihoods of continuations, read through the cache as `loglikelihood_mode` says."""
        self._warn_of_plain()
        run = super().loglikelihood
        return self._answer("loglikelihood", requests, lambda left: run(left, disable_tqdm=disable_tqdm))

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihoods of whole texts; an interrupted run begins this kind of request anew."""
        self._warn_of_plain()
        run, quiet = super().loglikelihood_rolling, disable_tqdm or not self.ranks.first
        return self._answer("loglikelihood_rolling", requests, lambda left: run(left, disable_tqdm=quiet))

    def _warn_of_plain(self) -> None:
        if self.quant_config.is_quantized and self.loglikelihood_mode == "plain" and self.ranks.first:
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
            "kvquant": settings_by_content(self.quant_config),
            "kvquant_loglikelihood": {
                "mode": self.loglikelihood_mode,
                "step": self.loglikelihood_step,
                "chunk": self.loglikelihood_chunk,
            },
            "kvquant_processes": {"count": self.ranks.size, "tensor_parallel": self.ranks.split_model},
            "kvquant_stats": summarize(self.calls),
            "kvquant_cautions": cautions(self.calls, self.quant_config),
        }


# An entry point of later lm-eval releases may have registered it already.
if MODEL_NAME not in model_registry:
    model_registry.register(MODEL_NAME)(KVQuantLM)
