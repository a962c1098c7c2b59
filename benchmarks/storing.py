#!/usr/bin/env python3
"""Time what storing costs: quantizing and packing keys and values of one layer, in a prompt and block by block.

    python benchmarks/storing.py --json out/storing.json
    python benchmarks/storing.py --quant k2v2 k2v2 kivi-int2 --shape 1,8,128

`block` is one block as decoding fills it, `prompt` 32 blocks at once; both in µs per token of one layer, keys and
values together. `+q` are keys rounded by query moments (random ones: the time does not depend on their values). A
cache pays it once per token, beside the steps that `generate.py` times as a whole. Of settings that differ by layer
those of layer 0 are timed.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from _command_line import check_threads, positive
from _report import environment, markdown_table, number, write_json
from _timing import Timing, computes_alone, interleave, shared_basis
from tqdm import tqdm

from kvquant_hf import KVQuantConfig, QueryMoments, list_presets
from kvquant_hf.eval import parse_quant
from kvquant_hf.layer import QuantLayer
from kvquant_hf.rope import KeyRotation

PROMPT_BLOCKS = 32
Storing = Callable[[], None]


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quant", nargs="+", metavar="NAME", help="presets or YAML paths (default: all that quantize)"
    )
    parser.add_argument("--shape", default="1,3,64", metavar="B,H_kv,D", help="sizes (default: %(default)s, SmolLM2)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--threads", type=positive, default=1, help="CPU threads (default %(default)s)")
    parser.add_argument("--samples", type=positive, default=30, help="per candidate (default %(default)s)")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write everything to this file")
    options = parser.parse_args(arguments)
    try:
        options.sizes = tuple(int(size) for size in options.shape.split(","))
    except ValueError:
        options.sizes = ()
    if len(options.sizes) != 3 or min(options.sizes, default=0) < 1 or options.sizes[2] % 2:
        parser.error(f"--shape must be three numbers B,H_kv,D with an even D, got {options.shape!r}")
    return options


def storing(config: KVQuantConfig, options: argparse.Namespace, blocks: int, moments: QueryMoments | None) -> Storing:
    """A call that quantizes and packs `blocks` blocks of keys and values."""
    batch_size, heads, head_dim = options.sizes
    rotation = KeyRotation(1 / 1e4 ** (torch.arange(head_dim // 2) / (head_dim // 2)), head_dim)
    feedback = None if moments is None else moments.feedback(0, config.key)
    layer = QuantLayer(config.replace(residual_length=0, sink_length=0), rotation, feedback=feedback)
    tokens = blocks * config.block_length
    generator = torch.Generator().manual_seed(0)
    shape = (batch_size, heads, tokens, head_dim)
    keys, values = (torch.randn(shape, generator=generator).to(getattr(torch, options.dtype)) for _ in range(2))

    def call() -> None:
        layer.reset()
        layer.update(keys, values)

    call()
    if layer.quantized_length != tokens:
        raise RuntimeError(f"{layer.quantized_length} of {tokens} tokens were stored as codes.")
    return call


def row(name: str, config: KVQuantConfig, timings: dict[str, Timing]) -> dict[str, object]:
    """One line of the table."""
    found: dict[str, object] = {"quant": name}
    for what, blocks in (("block", 1), ("prompt", PROMPT_BLOCKS)):
        basis, (seconds,) = shared_basis(timings[f"{name} {what}"])
        found[f"{what}_microseconds_per_token"] = seconds * 1e6 / (blocks * config.block_length)
        found[f"{what}_basis"] = basis
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write; returns the exit status."""
    options = parse_arguments(arguments)
    try:
        names = options.quant or [name for name in list_presets() if name != "dense"]
        configs = {name: parse_quant(name).for_layer(0, 1, "full_attention") for name in names}
        check_threads(options.threads)
        torch.set_num_threads(options.threads)
        _, heads, head_dim = options.sizes
        queries = torch.randn(heads, 4 * head_dim, head_dim, generator=torch.Generator().manual_seed(0))
        moments = QueryMoments({0: queries.transpose(-1, -2) @ queries}, 4 * head_dim)
        calls: dict[str, Storing] = {}
        rows: dict[str, KVQuantConfig] = {}
        for name, config in configs.items():
            for suffix, used in (("", None), ("+q", moments)):
                if used is not None and not (config.key.is_quantized and config.key.granularity == "per_channel"):
                    continue
                rows[name + suffix] = config
                for what, blocks in (("block", 1), ("prompt", PROMPT_BLOCKS)):
                    calls[f"{name}{suffix} {what}"] = storing(config, options, blocks, used)
    except (ValueError, FileNotFoundError) as error:
        print(f"storing.py: {error}", file=sys.stderr)
        return 1
    with tqdm(total=options.samples, unit="round", disable=None) as bar:
        alone = computes_alone(torch.device("cpu"))
        timings = interleave(calls, alone=alone, samples=options.samples, progress=bar.update)
    results = [row(name, config, timings) for name, config in rows.items()]
    header = ("cache", "block, µs/token", "prompt, µs/token")
    fields = ("block_microseconds_per_token", "prompt_microseconds_per_token")
    print(markdown_table(header, [[str(r["quant"]), *(number(float(str(r[f]))) for f in fields)] for r in results]))
    if options.json:
        report = {
            "environment": environment(),
            "shape": list(options.sizes),
            "dtype": options.dtype,
            "threads": options.threads,
            "prompt_blocks": PROMPT_BLOCKS,
            "configs": {name: config.to_dict() for name, config in configs.items()},
            "results": results,
        }
        write_json(options.json, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
