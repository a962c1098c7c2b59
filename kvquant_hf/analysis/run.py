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
from kvquant_hf.eval.score import CacheFactory, Protocol, Score, score_windows
from kvquant_hf.eval.score_store import FileStore
from kvquant_hf.eval.text import load_text, locate, token_windows
from kvquant_hf.query_moments import settings_by_content

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
    protocol = ablation.protocol
    resolved, model, windows = load_inputs(
        model_id, device, ablation.text, ablation.start, protocol.context, ablation.windows
    )
    for config in ablation.settings.values():
        QuantCache(model, config)  # refused before anything is run
    store = open_store(output, resolved, protocol, device, ablation.settings)
    attention = measure_attention(ablation.settings, model, windows, protocol, ablation.queries, store)
    scores = measure_scores(ablation.settings, model, windows, protocol, store) if ablation.scores else {}
    found = Measured(model_name(resolved), attention, scores)
    verdicts = tuple(judge(claim, partial(found.value, claim.metric), len(windows)) for claim in ablation.claims)
    return replace(found, verdicts=verdicts)


def load_inputs(
    model_id: str, device: Device, text: Path, start: str, context: int, windows: int
) -> tuple[str, PreTrainedModel, torch.Tensor]:
    """A model and windows of text.

    Args:
        model_id: Directory, hub id or `prepared:NAME`.
        device: Where the model runs.
        text: UTF-8 text.
        start: Where it begins, see `kvquant_hf.eval.locate`.
        context: Tokens of a window.
        windows: Number of windows, `N`.

    Returns:
        What `from_pretrained` took, the model in eval mode, and `[N, context]` tokens on its device.

    Raises:
        FileNotFoundError: The text or the prepared model is not there.
        ValueError: The text is too short.
    """
    resolved = resolve_model(model_id)
    content = load_text(text)
    tokenizer = AutoTokenizer.from_pretrained(resolved)
    tokens = token_windows(tokenizer, content[locate(content, start) :], context, windows).to(device.device)
    # Transformers types its own `to` in a way that takes no device.
    model: Any = AutoModelForCausalLM.from_pretrained(resolved, dtype=getattr(torch, device.dtype))
    return resolved, model.to(device.device).eval(), tokens


def open_store(
    output: Path, resolved: str, protocol: Protocol, device: Device, settings: Mapping[str, KVQuantConfig]
) -> FileStore:
    """Measurements that an earlier run of the same left in `output`, and a place for new ones."""
    setting = {
        "model": model_fingerprint(resolved),
        "protocol": [protocol.context, protocol.prefill, protocol.step],
        "types": [device.dtype, device.device],
        "versions": package_versions(),
    }
    return FileStore(output / STORE, setting, {name: settings_by_content(c) for name, c in settings.items()})


def measure_attention(
    settings: Mapping[str, KVQuantConfig],
    model: PreTrainedModel,
    windows: torch.Tensor,
    protocol: Protocol,
    queries: int,
    store: FileStore,
) -> dict[str, tuple[HeadSums, ...]]:
    """`analyze_window` of every window `[N, context]`, with a progress bar, kept in `store`.

    Returns:
        Sums of each window, by setting, and of `FACTS_NAME`.
    """
    kind = f"attention of {queries} queries"
    names = (*settings, FACTS_NAME)
    found: dict[str, list[HeadSums]] = {name: [] for name in names}
    layers = len(QuantCache(model).quantized_layers)
    with tqdm(total=len(windows) * layers, desc="attention", unit="layer", disable=None) as bar:
        for window in windows:
            known = {name: store.get_item(kind, name, window) for name in names}
            left = {name: config for name, config in settings.items() if known[name] is None}
            if left or known[FACTS_NAME] is None:
                new = analyze_window(model, window, left, protocol, queries, lambda _: bar.update())
                for name, sums in new.items():
                    known[name] = sums.to_dict()
                    store.put_item(kind, name, window, known[name])
            else:
                bar.update(layers)
            for name in names:
                found[name].append(HeadSums.from_dict(known[name]))
    return {name: tuple(sums) for name, sums in found.items()}


def measure_scores(
    settings: Mapping[str, KVQuantConfig],
    model: PreTrainedModel,
    windows: torch.Tensor,
    protocol: Protocol,
    store: FileStore,
    share_prefill: bool = False,
) -> dict[str, Score]:
    """`score_windows` of every setting, with a progress bar, kept in `store`."""

    def maker(config: KVQuantConfig) -> CacheFactory:
        return lambda: QuantCache(model, config)

    factories = {name: maker(config) for name, config in settings.items()}
    total = len(windows) * protocol.scored * (1 + len(factories))
    with tqdm(total=total, desc="scoring", unit="tok", disable=None) as bar:

        def progress(name: str, tokens: int) -> None:
            bar.set_postfix_str(name, refresh=False)
            bar.update(tokens)

        return score_windows(model, windows, factories, protocol, progress, store, share_prefill)


def text_facts(path: Path, start: str, windows: int) -> dict[str, Any]:
    """What a text is, for reports.

    Args:
        path: The text.
        start: Where it begins, see `kvquant_hf.eval.locate`.
        windows: Windows of it that were measured.
    """
    return {
        "text": path.name,
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "start": start,
        "offset": locate(load_text(path), start),
        "windows": windows,
    }
