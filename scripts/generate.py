#!/usr/bin/env python3
"""Let a model answer a question about a long text with the dense cache and with quantized ones, and compare.

    python scripts/generate.py --model DIR_OR_HUB_ID --quant k4v4 k2v2

Prints what each cache holds (bytes by part, bits per value), the speed of prefill and decoding, the texts, and the
first token at which a text differs from the dense cache's. Greedy decoding, so a difference is the cache's doing.
Speeds are those of one run: an impression, not a benchmark.
"""

import argparse
import json
import os
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import Cache
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging

from kvquant_hf import QuantCache
from kvquant_hf._compat import cache_kwargs
from kvquant_hf.eval import held_bits, load_text, parse_quant, run_environment
from kvquant_hf.eval.arguments import usable_device

DENSE = "DynamicCache"
DEFAULT_MODEL = "smollm2-135m"
DEFAULT_PROMPT = Path(__file__).parent.parent / "data" / "pride_and_prejudice_excerpt.txt"
DEFAULT_QUESTION = "Write a short summary of this chapter: who are the characters and what do they talk about?"
# Enough for sinks, residual window and a block of codes of every preset.
WARM_UP_TOKENS = 512
PARTS = ("codes", "scales", "zero_points", "sinks", "residual", "unused", "other_layers")


@dataclass
class Run:
    """One generation.

    Attributes:
        cache: Name of the cache configuration.
        text: What was generated.
        token_ids: Its tokens.
        parts: Bytes held at the end, by part.
        total_bytes: Their sum.
        bits_per_value: Over all that is held, bits.
        bits_per_value_quantized: Over the quantized part, bits; `None` where there is none.
        prefill_tokens_per_s: Prompt tokens over the time to the first new token.
        decode_tokens_per_s: Later tokens over the time they took.
        first_difference: Index of the first new token that is not the dense cache's, `None` where all are the same.
    """

    cache: str
    text: str
    token_ids: list[int]
    parts: dict[str, int]
    total_bytes: int
    bits_per_value: float
    bits_per_value_quantized: float | None
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    first_difference: int | None = None


class Clock(BaseStreamer):
    """Notes when each token arrives and moves a progress bar. `generate` hands it the prompt first."""

    def __init__(self, bar: "tqdm[object]") -> None:
        self.bar = bar
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())
        if len(self.times) > 1:
            self.bar.update(value.numel())

    def end(self) -> None:
        self.bar.refresh()


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="directory or hub id (default: SmolLM2 as prepared by get_model.py)")
    parser.add_argument(
        "--quant",
        nargs="+",
        default=["k4v4", "k2v2"],
        metavar="NAME",
        help="preset or YAML path, each with optional settings: k2v2,residual_length=64 (default: k4v4 k2v2)",
    )
    parser.add_argument("--prompt", type=Path, default=DEFAULT_PROMPT, help="text file (default: shipped excerpt)")
    parser.add_argument("--question", default=DEFAULT_QUESTION, help="asked after the text")
    parser.add_argument("--prompt-tokens", type=int, default=2400, help="paragraphs of the text up to this length")
    parser.add_argument("--new-tokens", type=int, default=96, help="most tokens to generate (default %(default)s)")
    parser.add_argument("--min-new-tokens", type=int, default=64, help="fewest (default %(default)s)")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto")
    parser.add_argument("--device", type=usable_device, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--attn", default="sdpa", metavar="NAME", help="attention implementation (default sdpa)")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads (default: the CPUs that are idle)")
    parser.add_argument("--json", type=Path, metavar="OUT", help="also write everything to this file")
    return parser.parse_args(arguments)


def idle_threads() -> int:
    """CPUs that other work leaves, at least one: more threads than that wait for each other at every operation."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    return max(1, min(8, cpus - round(load)))


def default_model() -> str:
    """Directory of the prepared default model.

    Raises:
        ValueError: It is not there.
    """
    sys.path.insert(0, str(Path(__file__).parent))
    from get_model import RECIPES, models_dir, ready

    directory = models_dir() / DEFAULT_MODEL
    if not ready(directory, RECIPES[DEFAULT_MODEL]):
        raise ValueError(
            f"no --model given and {DEFAULT_MODEL} not prepared: run scripts/get_model.py {DEFAULT_MODEL}"
        )
    return str(directory)


def encode_prompt(tokenizer: PreTrainedTokenizerBase, text: str, question: str, most_tokens: int) -> torch.Tensor:
    """Token ids `[1, P]`: whole paragraphs of `text` up to `most_tokens`, then the question."""
    kept: list[str] = []
    used = 0
    for paragraph in text.split("\n\n"):
        used += len(tokenizer(paragraph + "\n\n", add_special_tokens=False, verbose=False).input_ids)
        if kept and used > most_tokens:
            break
        kept.append(paragraph)
    passage = "\n\n".join(kept)
    if tokenizer.chat_template:
        messages = [{"role": "user", "content": f"{passage}\n\n{question}"}]
        encoded = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        return encoded["input_ids"]
    return tokenizer(f"{passage}\n\nQuestion: {question}\nAnswer:", return_tensors="pt").input_ids


def bytes_by_part(cache: Cache) -> dict[str, int]:
    """Bytes held by part; of a dense cache all of them are residual, that is exact."""
    if not isinstance(cache, QuantCache):
        return dict.fromkeys(PARTS, 0) | {"residual": held_bits(cache).memory_bytes}
    report = cache.memory_report()
    return {part: getattr(report, part) for part in PARTS}


def generate_with(
    name: str,
    cache: Cache,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    input_ids: torch.Tensor,
    limits: dict[str, int],
) -> Run:
    """Generate greedily with `cache` and measure."""
    prompt_length = input_ids.shape[1]
    with tqdm(total=limits["max_new_tokens"], desc=f"{name:>12}", unit="tok", disable=None, leave=False) as bar:
        clock = Clock(bar)
        output = model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            do_sample=False,
            streamer=clock,
            pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
            **limits,
            **cache_kwargs(cache),
        )
    new = output[0, prompt_length:].tolist()
    start, first, *later = clock.times
    held = held_bits(cache)
    return Run(
        cache=name,
        text=tokenizer.decode(new, skip_special_tokens=True).strip(),
        token_ids=new,
        parts=bytes_by_part(cache),
        total_bytes=held.memory_bytes,
        bits_per_value=held.bits_per_value,
        bits_per_value_quantized=held.bits_per_value_quantized,
        prefill_tokens_per_s=prompt_length / (first - start),
        decode_tokens_per_s=len(later) / (later[-1] - first) if later else 0.0,
    )


def first_difference(ids: list[int], reference: list[int]) -> int | None:
    """Index of the first token in which two sequences differ, `None` where they are the same."""
    for i, (one, other) in enumerate(zip(ids, reference, strict=False)):
        if one != other:
            return i
    return None if len(ids) == len(reference) else min(len(ids), len(reference))


def table(runs: list[Run]) -> str:
    dense = runs[0].total_bytes
    rows = [("", [run.cache for run in runs])]
    for part in PARTS:
        if any(run.parts[part] for run in runs):
            rows.append((f"{part.replace('_', ' ')}, bytes", [f"{run.parts[part]:,}" for run in runs]))
    rows += [
        ("total, bytes", [f"{run.total_bytes:,}" for run in runs]),
        ("of the dense cache", [f"{run.total_bytes / dense:.3f}" for run in runs]),
        ("bits per value", [f"{run.bits_per_value:.2f}" for run in runs]),
        (
            "  quantized part",
            ["-" if run.bits_per_value_quantized is None else f"{run.bits_per_value_quantized:.2f}" for run in runs],
        ),
        ("prefill, tokens/s", [f"{run.prefill_tokens_per_s:.1f}" for run in runs]),
        ("decode, tokens/s", [f"{run.decode_tokens_per_s:.1f}" for run in runs]),
        ("differs from token", ["-" if run.first_difference is None else f"{run.first_difference}" for run in runs]),
    ]
    label = max(len(name) for name, _ in rows)
    widths = [max(len(cells[i]) for _, cells in rows) for i in range(len(runs))]
    return "\n".join(
        f"{name:<{label}}  " + "  ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
        for name, cells in rows
    )


def run(options: argparse.Namespace) -> dict[str, object]:
    threads = options.threads or idle_threads()
    torch.set_num_threads(threads)
    logging.disable_progress_bar()
    model_id = options.model or default_model()
    name = Path(model_id).name if Path(model_id).is_dir() else model_id
    configs = {quant: parse_quant(quant) for quant in options.quant}

    tokenizer = AutoTokenizer.from_pretrained(model_id)
    dtype = options.dtype if options.dtype == "auto" else getattr(torch, options.dtype)
    model = AutoModelForCausalLM.from_pretrained(model_id, dtype=dtype, attn_implementation=options.attn)
    model = model.to(options.device).eval()
    input_ids = encode_prompt(tokenizer, load_text(options.prompt), options.question, options.prompt_tokens)
    input_ids = input_ids.to(options.device)
    where = f"{threads} thread(s)" if options.device == "cpu" else options.device
    print(f"{name}, {str(model.dtype).removeprefix('torch.')}, {where}: a prompt of {input_ids.shape[1]:,} tokens")
    print(f"from {options.prompt.name} with the question: {options.question}\n", flush=True)

    limits = {"max_new_tokens": options.new_tokens, "min_new_tokens": min(options.min_new_tokens, options.new_tokens)}
    makers: dict[str, Callable[[], Cache]] = {DENSE: partial(DynamicCache, config=model.config)}
    makers |= {quant: partial(QuantCache, model, config) for quant, config in configs.items()}
    # First calls pay for allocations and thread pools, those that read codes also for compiling a kernel.
    warm_up = {"max_new_tokens": 2, "min_new_tokens": 2}
    for make_cache in makers.values():
        generate_with("warm-up", make_cache(), model, tokenizer, input_ids[:, :WARM_UP_TOKENS], warm_up)
    runs: list[Run] = []
    for kind, make_cache in makers.items():
        one = generate_with(kind, make_cache(), model, tokenizer, input_ids, limits)
        if runs:
            one.first_difference = first_difference(one.token_ids, runs[0].token_ids)
        runs.append(one)
        print(f"--- {kind}, {len(one.token_ids)} new tokens")
        paragraphs = (textwrap.fill(paragraph, 100) for paragraph in one.text.split("\n\n"))
        print("\n\n".join(paragraphs) + "\n", flush=True)
    print(table(runs))
    print("\nJudge a cache by DynamicCache, the dense one: a small model may well answer poorly with any cache.")
    return {
        "environment": run_environment(options.device),
        "model": name,
        "dtype": str(model.dtype).removeprefix("torch."),
        "prompt": options.prompt.name,
        "prompt_tokens": input_ids.shape[1],
        "question": options.question,
        "configs": {quant: config.to_dict() for quant, config in configs.items()},
        "runs": [asdict(one) for one in runs],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    try:
        report = run(options)
    except (ValueError, OSError) as error:
        print(f"generate.py: {error}", file=sys.stderr)
        return 1
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        print(f"Written to {options.json}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
