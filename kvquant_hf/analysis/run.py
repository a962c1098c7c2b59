"""Measuring an ablation: attention errors and scores of all settings, kept on disk as they come."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from kvquant_hf import QuantCache
from kvquant_hf.analysis.ablation import Ablation
from kvquant_hf.analysis.attention_error import FACTS_NAME, analyze_window
from kvquant_hf.analysis.claims import SCORES, Verdict, judge
from kvquant_hf.analysis.measures import HeadSums
from kvquant_hf.config import KVQuantConfig
from kvquant_hf.eval.environment import package_versions
from kvquant_hf.eval.models import model_fingerprint, model_name, resolve_model
from kvquant_hf.eval.score import CacheFactory, Score, score_windows
from kvquant_hf.eval.score_store import FileStore
from kvquant_hf.eval.text import load_text, locate, token_windows
from kvquant_hf.layer import QuantLayer

STORE = "measurements.jsonl"


@dataclass(frozen=True)
class Device:
    """Where and in which precision a model runs.

    Attributes:
        dtype: `float32`, `bfloat16` or `float16`.
        device: A torch device.
    """

    dtype: str = "float32"
    device: str = "cpu"


@dataclass(frozen=True)
class Measured:
    """One model under all settings.

    Attributes:
        model: Its name.
        attention: Sums of each window, by setting, and of `FACTS_NAME`.
        scores: Scores by setting, the dense cache's under `REFERENCE`; empty where predictions were not scored.
        verdicts: What it says about the claims.
    """

    model: str
    attention: Mapping[str, tuple[HeadSums, ...]]
    scores: Mapping[str, Score]
    verdicts: tuple[Verdict, ...] = ()

    def total(self, setting: str) -> HeadSums:
        """Attention errors of a setting over all windows."""
        return HeadSums.total(self.attention[setting])

    def value(self, metric: str, setting: str, window: int | None = None) -> float:
        """A metric of a setting: of one window, or of all."""
        if metric in SCORES:
            score = self.scores[setting]
            return float(getattr(score if window is None else Score.of([score.chunks[window]]), metric))
        return (self.total(setting) if window is None else self.attention[setting][window]).mean(metric)


def measure(ablation: Ablation, model_id: str, output: Path, device: Device) -> Measured:
    """Measure one model, taking from `output` what an earlier run of the same left there.

    Args:
        ablation: What to measure.
        model_id: Directory, hub id or `prepared:NAME`.
        output: Directory of the ablation.
        device: Where the model runs.

    Raises:
        FileNotFoundError: The text or the prepared model is not there.
        ValueError: A setting does not fit the model, or the text is too short.
    """
    resolved = resolve_model(model_id)
    text = load_text(ablation.text)
    tokenizer = AutoTokenizer.from_pretrained(resolved)
    windows = token_windows(
        tokenizer, text[locate(text, ablation.start) :], ablation.protocol.context, ablation.windows
    ).to(device.device)
    # Transformers types its own `to` in a way that takes no device.
    model: Any = AutoModelForCausalLM.from_pretrained(resolved, dtype=getattr(torch, device.dtype))
    model = model.to(device.device).eval()
    for config in ablation.settings.values():
        QuantCache(model, config)  # refused before anything is run
    store = _store(ablation, resolved, output, device)
    attention = _attention(ablation, model, windows, store)
    scores = _scores(ablation, model, windows, store) if ablation.scores else {}
    found = Measured(model_name(resolved), attention, scores)
    verdicts = tuple(judge(claim, partial(found.value, claim.metric), len(windows)) for claim in ablation.claims)
    return replace(found, verdicts=verdicts)


def _store(ablation: Ablation, resolved: str, output: Path, device: Device) -> FileStore:
    protocol = ablation.protocol
    setting = {
        "model": model_fingerprint(resolved),
        "protocol": [protocol.context, protocol.prefill, protocol.step],
        "types": [device.dtype, device.device],
        "versions": package_versions(),
    }
    return FileStore(output / STORE, setting, {name: c.to_dict() for name, c in ablation.settings.items()})


def _attention(
    ablation: Ablation, model: PreTrainedModel, windows: torch.Tensor, store: FileStore
) -> dict[str, tuple[HeadSums, ...]]:
    kind = f"attention of {ablation.queries} queries"
    names = (*ablation.settings, FACTS_NAME)
    found: dict[str, list[HeadSums]] = {name: [] for name in names}
    layers = sum(isinstance(layer, QuantLayer) for layer in QuantCache(model).layers)
    with tqdm(total=len(windows) * layers, desc="attention", unit="layer", disable=None) as bar:
        for window in windows:
            known = {name: store.get_item(kind, name, window) for name in names}
            left = {name: config for name, config in ablation.settings.items() if known[name] is None}
            if left or known[FACTS_NAME] is None:
                new = analyze_window(model, window, left, ablation.protocol, ablation.queries, lambda _: bar.update())
                for name, sums in new.items():
                    known[name] = sums.to_dict()
                    store.put_item(kind, name, window, known[name])
            else:
                bar.update(layers)
            for name in names:
                found[name].append(HeadSums.from_dict(known[name]))
    return {name: tuple(sums) for name, sums in found.items()}


def _scores(ablation: Ablation, model: PreTrainedModel, windows: torch.Tensor, store: FileStore) -> dict[str, Score]:
    def maker(config: KVQuantConfig) -> CacheFactory:
        return lambda: QuantCache(model, config)

    factories = {name: maker(config) for name, config in ablation.settings.items()}
    total = len(windows) * ablation.protocol.scored * (1 + len(factories))
    with tqdm(total=total, desc="scoring", unit="tok", disable=None) as bar:

        def progress(name: str, tokens: int) -> None:
            bar.set_postfix_str(name, refresh=False)
            bar.update(tokens)

        return score_windows(model, windows, factories, ablation.protocol, progress, store)


def text_facts(ablation: Ablation) -> dict[str, Any]:
    """What the text is, for reports."""
    text = load_text(ablation.text)
    return {
        "text": ablation.text.name,
        "sha256": hashlib.sha256(ablation.text.read_bytes()).hexdigest(),
        "start": ablation.start,
        "offset": locate(text, ablation.start),
        "windows": ablation.windows,
    }
