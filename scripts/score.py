#!/usr/bin/env python3
"""Score quantized caches on a text, teacher-forced through the cache, against the dense cache.

    python scripts/score.py --model DIR --quant k8v8 k4v4 k2v2,residual_length=64 my.yaml --text wiki.test.raw
    python scripts/score.py --model DIR --quant k4v4 --baseline hf-quanto hf-quanto:2 hf-hqq --text book.txt \
        --start "Chapter 13" --chunks 2 --text LICENSE --chunks 1 --json out/score.json
    python scripts/score.py --model prepared:smollm2-135m --quant k2v2 k3v2 --query-moments out/smollm2.safetensors \
        --text wiki.test.raw
    python scripts/score.py --model prepared:smollm2-135m prepared:qwen2.5-coder-0.5b --all-presets \
        --text wiki.test.raw --chunks 8 --divergence 128 --report out/score

A window of --context tokens is fed as a prefill of --prefill tokens and then in pieces of --step tokens, each of which
attends to what the cache gives back; every token after the prefill is scored. `bits` count everything that the cache
of a 16-bit model holds after such a window; `bits (q)` the quantized part alone, scales and zero points included.
--text may be repeated; --start and --chunks then hold for the texts in their order (one --chunks holds for all).
--report writes plots, markdown and JSON, and lets an interrupted run go on when the command is repeated.
"""

import argparse
import hashlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from kvquant_hf import KVQuantConfig, QuantCache, list_presets
from kvquant_hf.eval import (
    BASELINES,
    CacheFactory,
    HeldBits,
    Protocol,
    baseline_factory,
    load_text,
    locate,
    parse_quant,
    replayed_bits,
    run_environment,
    score_windows,
    token_windows,
)
from kvquant_hf.eval.arguments import new_directory, positive, usable_device
from kvquant_hf.eval.artifacts import write_json
from kvquant_hf.eval.bits import as_decided, model_shapes
from kvquant_hf.eval.divergence import Divergence, first_divergence, greedy_text
from kvquant_hf.eval.environment import package_versions
from kvquant_hf.eval.models import model_fingerprint, model_name, resolve_model
from kvquant_hf.eval.score import REFERENCE
from kvquant_hf.eval.score_report import ModelScores, table, write_score_report
from kvquant_hf.eval.score_store import FileStore
from kvquant_hf.query_moments import settings_by_content

BITS_DTYPE = torch.bfloat16


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", nargs="+", required=True, metavar="NAME", help="directories, hub ids or prepared:NAME"
    )
    parser.add_argument(
        "--quant",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME",
        help="preset or YAML path, each with optional settings: k2v2,residual_length=64,key.nbits=3",
    )
    parser.add_argument("--all-presets", action="store_true", help="score every preset")
    parser.add_argument(
        "--query-moments",
        nargs="+",
        default=[],
        metavar="FILE",
        help="score every --quant with 2 to 8-bit keys per channel once more, as NAME+q, with keys rounded by the "
        "model's queries: a file of scripts/query_moments.py for each --model",
    )
    parser.add_argument(
        "--baseline",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME",
        help=f"Transformers' QuantizedCache: {', '.join(BASELINES)}, with optional width as in hf-quanto:2",
    )
    parser.add_argument("--text", type=Path, action="append", required=True, help="UTF-8 text or raw WikiText split")
    parser.add_argument(
        "--start", action="append", default=[], help='character offset, or how a line begins: "Chapter 13" (default 0)'
    )
    parser.add_argument("--chunks", type=int, action="append", default=[], help="windows of a text (default 4)")
    parser.add_argument("--context", type=int, default=1024, help="tokens of a window (default %(default)s)")
    parser.add_argument("--prefill", type=int, default=256, help="tokens fed at once first (default %(default)s)")
    parser.add_argument("--step", type=int, default=64, help="tokens of each later piece (default %(default)s)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--device", type=usable_device, default="cpu")
    parser.add_argument("--attn", default="sdpa", metavar="NAME", help="attention implementation (default sdpa)")
    parser.add_argument("--threads", type=positive, default=1, help="CPU threads (default 1, for shared machines)")
    parser.add_argument(
        "--divergence",
        type=int,
        default=0,
        metavar="N",
        help="also find where greedy text after each prefill leaves the dense cache's, looking at N tokens",
    )
    parser.add_argument("--report", type=new_directory, metavar="DIR", help="also write report and plots; resumable")
    parser.add_argument("--json", type=Path, metavar="OUT", help="also write everything to this file")
    options = parser.parse_args(arguments)
    if len(options.start) > len(options.text):
        parser.error(f"{len(options.start)} times --start for {len(options.text)} --text")
    options.start += ["0"] * (len(options.text) - len(options.start))
    options.chunks = options.chunks or [4]
    if len(options.chunks) == 1:
        options.chunks *= len(options.text)
    if len(options.chunks) != len(options.text):
        parser.error(f"{len(options.chunks)} times --chunks for {len(options.text)} --text")
    if options.divergence < 0:
        parser.error(f"--divergence must be at least 0, got {options.divergence}")
    if options.all_presets:
        options.quant += [name for name in list_presets() if name not in options.quant]
    if not options.quant and not options.baseline:
        parser.error("name at least one --quant or --baseline")
    if options.query_moments and len(options.query_moments) != len(options.model):
        parser.error(f"{len(options.query_moments)} files of --query-moments for {len(options.model)} --model")
    options.query_moments = options.query_moments or [None] * len(options.model)
    return options


def read_windows(
    options: argparse.Namespace, tokenizer: PreTrainedTokenizerBase
) -> tuple[torch.Tensor, list[dict[str, object]]]:
    """Windows of all texts `[N, context]`, and what they are made of."""
    windows, texts = [], []
    for path, start, chunks in zip(options.text, options.start, options.chunks, strict=True):
        text = load_text(path)
        first = locate(text, start)
        windows.append(token_windows(tokenizer, text[first:], options.context, chunks))
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        texts.append({"text": path.name, "sha256": digest, "start": start, "offset": first, "chunks": chunks})
    return torch.cat(windows), texts


def cache_factories(
    options: argparse.Namespace, model: PreTrainedModel, moments: str | None
) -> tuple[dict[str, CacheFactory], dict[str, KVQuantConfig]]:
    """Makers of fresh caches by name, and the settings of ours; `moments` is a file with query moments."""
    configs: dict[str, KVQuantConfig] = {}
    for name in options.quant:
        config = configs[name] = parse_quant(name)
        if moments and config.key.is_quantized and config.key.granularity == "per_channel":
            configs[f"{name}+q"] = config.replace(query_moments=moments)

    def maker(config: KVQuantConfig) -> CacheFactory:
        return lambda: QuantCache(model, config)

    factories = {name: maker(config) for name, config in configs.items()}
    factories |= {name: baseline_factory(name, model.config) for name in options.baseline}
    for make_cache in factories.values():
        make_cache()  # a setting that this model cannot have is refused before anything is run
    return factories, configs


def measure_bits(
    model: PreTrainedModel, factories: dict[str, CacheFactory], protocol: Protocol, window: torch.Tensor
) -> dict[str, HeldBits]:
    """What each cache holds after a window, were the model one of 16 bits; outlier guards decide by `window`."""
    shapes, pieces = model_shapes(model), protocol.pieces()
    makers = {REFERENCE: lambda: DynamicCache(config=model.config), **factories}
    makers = {name: as_decided(make, model, window, pieces) for name, make in makers.items()}
    return {name: replayed_bits(make, shapes, pieces, BITS_DTYPE) for name, make in makers.items()}


def measure_divergence(
    options: argparse.Namespace,
    model: PreTrainedModel,
    windows: torch.Tensor,
    factories: dict[str, CacheFactory],
    store: FileStore | None,
) -> dict[str, Divergence]:
    """First differences of greedy text by cache name."""
    tokens = options.divergence
    first: dict[str, list[int]] = {name: [] for name in factories} if tokens else {}
    for window in tqdm(windows, desc="greedy text", unit="window", disable=None if tokens else True):
        text: torch.Tensor | None = None
        for name in first:
            count = None if store is None else store.get_divergence(name, window, tokens)
            if count is None:
                prompt = window[: options.prefill]
                text = greedy_text(model, prompt, tokens) if text is None else text
                count = first_divergence(model, prompt, text, factories[name]())
                if store is not None:
                    store.put_divergence(name, window, tokens, count)
            first[name].append(count)
    return {name: Divergence(tokens, tuple(counts)) for name, counts in first.items()}


def open_store(options: argparse.Namespace, resolved: str, configs: dict[str, KVQuantConfig]) -> FileStore | None:
    """Where scores are kept between runs, if a report is asked for."""
    if options.report is None:
        return None
    setting = {
        "model": model_fingerprint(resolved),
        "protocol": [options.context, options.prefill, options.step],
        "types": [options.dtype, options.attn, options.device],
        "versions": package_versions(),
    }
    deciding = {name: settings_by_content(config) for name, config in configs.items()}
    return FileStore(options.report / "chunks.jsonl", setting, deciding)


def score_model(
    options: argparse.Namespace, resolved: str, windows: torch.Tensor, moments: str | None
) -> tuple[ModelScores, dict[str, KVQuantConfig]]:
    """All caches of one model."""
    protocol = Protocol(options.context, options.prefill, options.step)
    model = AutoModelForCausalLM.from_pretrained(
        resolved, dtype=getattr(torch, options.dtype), attn_implementation=options.attn
    )
    model = model.to(options.device).eval()
    windows = windows.to(options.device)
    factories, configs = cache_factories(options, model, moments)
    store = open_store(options, resolved, configs)
    total = len(windows) * protocol.scored * (1 + len(factories))
    with tqdm(total=total, unit="tok", desc="scoring", disable=None) as bar:

        def progress(name: str, tokens: int) -> None:
            bar.set_postfix_str(name, refresh=False)
            bar.update(tokens)

        scores = score_windows(model, windows, factories, protocol, progress, store)
    divergence = measure_divergence(options, model, windows, factories, store)
    bits = measure_bits(model, factories, protocol, windows[0])
    return ModelScores(model_name(resolved), scores, bits, divergence), configs


def run(options: argparse.Namespace) -> dict[str, object]:
    if (processes := int(os.environ.get("WORLD_SIZE", "1"))) > 1:
        raise ValueError(
            f"scores are computed by one process, got {processes} (WORLD_SIZE). Start one command for each device, "
            "with other models, caches or texts, as in `--device cuda:1`; tasks run on several, see docs/scaling.md."
        )
    torch.set_num_threads(options.threads)
    logging.disable_progress_bar()
    Protocol(options.context, options.prefill, options.step)  # refused before a model is loaded
    measured: list[ModelScores] = []
    configs: dict[str, KVQuantConfig] = {}
    texts: list[dict[str, object]] = []
    resolved_models = [resolve_model(name) for name in options.model]
    for resolved, moments in zip(resolved_models, options.query_moments, strict=True):
        windows, texts = read_windows(options, AutoTokenizer.from_pretrained(resolved))
        scored, configs = score_model(options, resolved, windows, moments)
        measured.append(scored)
        tokens = scored.scores[REFERENCE].tokens
        print(f"{scored.model}, {options.dtype}, {len(windows)} windows of {options.context} tokens, {tokens} scored")
        print(table(scored))
    return {
        "environment": run_environment(options.device),
        "protocol": {
            "context": options.context,
            "prefill": options.prefill,
            "step": options.step,
            "dtype": options.dtype,
            "attention": options.attn,
        },
        "bits_dtype": str(BITS_DTYPE).removeprefix("torch."),
        "texts": texts,
        "configs": {name: config.to_dict() for name, config in configs.items()},
        "results": [row for scored in measured for row in scored.rows()],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    try:
        report = run(options)
    except (ValueError, ImportError, OSError) as error:
        print(f"score.py: {error}", file=sys.stderr)
        return 1
    if options.json:
        write_json(options.json, report)
        print(f"Written to {options.json}", file=sys.stderr)
    if options.report:
        print(f"Report: {write_score_report(options.report, report)}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
