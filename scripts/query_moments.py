#!/usr/bin/env python3
"""Collect a model's query moments from texts, so that caches can round keys where its queries do not look.

    python scripts/query_moments.py --model prepared:smollm2-135m --text data/pride_and_prejudice_17_chapters.txt \
        --text LICENSE --text README.md --windows 4 1 1 --output out/smollm2.safetensors

    QuantCache(model.config, "k2v2", query_moments="out/smollm2.safetensors")
    python scripts/score.py --quant k2v2 k2v2,query_moments=out/smollm2.safetensors ...

A few thousand tokens of several kinds of text serve all uses of a model; it takes one forward pass.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from kvquant_hf import QueryMoments
from kvquant_hf.eval import load_text, token_windows
from kvquant_hf.eval.arguments import positive, usable_device
from kvquant_hf.eval.models import model_name, resolve_model


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, metavar="NAME", help="directory, hub id or prepared:NAME")
    parser.add_argument("--text", type=Path, action="append", required=True, help="UTF-8 text; may be repeated")
    parser.add_argument("--windows", type=int, nargs="+", default=[4], help="windows of each text (default 4)")
    parser.add_argument("--context", type=int, default=1024, help="tokens of a window (default %(default)s)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--device", type=usable_device, default="cpu")
    parser.add_argument("--threads", type=positive, default=1, help="CPU threads (default 1, for shared machines)")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="safetensors file to write")
    options = parser.parse_args(arguments)
    if len(options.windows) == 1:
        options.windows *= len(options.text)
    if len(options.windows) != len(options.text):
        parser.error(f"{len(options.windows)} numbers of --windows for {len(options.text)} --text")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Collect and write; returns the exit status."""
    options = parse_arguments(arguments)
    logging.set_verbosity_error()
    torch.set_num_threads(options.threads)
    try:
        resolved = resolve_model(options.model)
        texts = [load_text(path) for path in options.text]
        tokenizer = AutoTokenizer.from_pretrained(resolved)
        windows = [
            token_windows(tokenizer, text, options.context, count)
            for text, count in zip(texts, options.windows, strict=True)
        ]
        model = AutoModelForCausalLM.from_pretrained(resolved, dtype=getattr(torch, options.dtype))
        input_ids = torch.cat(windows).to(options.device)
        with tqdm(total=len(input_ids), unit="window", file=sys.stderr) as bar:
            moments = QueryMoments.collect(model.eval().to(options.device), input_ids, progress=bar.update)
    except (FileNotFoundError, ValueError) as error:
        print(f"query_moments.py: {error}", file=sys.stderr)
        return 2
    moments.save(options.output)
    print(f"{model_name(resolved)}: {moments} in {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
