"""The GPU backend on one GPU: kernel tests, attention, quantization, decoding. Fits in ten minutes on an H200.

    python benchmarks/gpu.py --json benchmarks/results/gpu.json      # everything
    python benchmarks/gpu.py --only attention --json out/gpu.json    # one part
    TRITON_INTERPRET=1 python benchmarks/gpu.py --dry-run            # the same code on tiny shapes, without a GPU

Written for torch 2.11, triton 3.6 and transformers 5.17; needs no network.

Predictions, written before the first run (H200: 132 multiprocessors, 4.8 TB/s nominal, about 4.3 TB/s copied; flash
in bf16 taken as memory-bound at 85 % of that). The issue limit uses the instructions per element that
`benchmarks/triton_aot.py` counts, 132 · 4 · 32 lanes at 1.755 GHz and 70 to 100 % of all issue slots used:

    head size 128, GQA 4, B·L >= 512k tokens    speed-up over flash    share of the copy bandwidth
    k8v8  1.125 bytes an element                1.5 - 1.8              0.75 - 0.90
    k4v4  0.625 bytes an element                2.3 - 3.2              0.60 - 0.85
    k2v2  0.375 bytes an element                2.6 - 3.7              0.40 - 0.60, limited by issue slots

- Head size 64 loses 5 to 10 % against 128: the work per tile that does not depend on its size is spread thinner.
- GQA 8 costs the packed kernel nothing (8 rows fit one tile); flash gains nothing from it either.
- B·L below 64k tokens: launches and the combine step weigh more than the bytes; eager speed-ups fall below 1 and only
  CUDA graphs show the kernel (about 20 us a call).
- Quantize and pack: 30 to 60 % of the copy bandwidth for a prompt, limited by packing instructions.
- Decoding an 8B model: batch 1 at 32k gains at most 1.1 x (weights dominate, 16 GB a step against 4 GB of bf16 KV),
  batch 64 at 8k 1.8 x or more under a graph; peak memory of the cache falls to 0.32 (k4v4) and 0.20 (k2v2) of bf16.

Targets: k4v4 >= 2.8 x flash and >= 70 % of the copy bandwidth, k2v2 >= 3.5 x flash, at B·L >= 512k tokens.
"""

import argparse
import functools
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # the checkout's package, wherever the script is called from

import torch  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from tqdm import tqdm  # noqa: E402

from kvquant_hf import QuantCache  # noqa: E402
from kvquant_hf.config import KVQuantConfig  # noqa: E402
from kvquant_hf.eval.environment import run_environment  # noqa: E402
from kvquant_hf.layer import QuantLayer  # noqa: E402
from kvquant_hf.ops import decode_attention, encode_blocks  # noqa: E402
from kvquant_hf.rope import KeyRotation  # noqa: E402

PARTS = ("tests", "bandwidth", "attention", "quantize", "generate")
TARGETS = {"k4v4": 2.8, "k2v2": 3.5}
LONG = 512 * 1024  # tokens of all rows from which the targets hold


class Bench:
    """Shapes, device and timing of a run: real on a GPU, tiny in Triton's interpreter.

    Args:
        dry_run: Whether to run tiny shapes on the CPU.
        budget_s: Seconds after which no further measurement is started.
    """

    def __init__(self, dry_run: bool, budget_s: float) -> None:
        self.dry_run = dry_run
        self.device = torch.device("cpu" if dry_run else "cuda")
        self.dtype = torch.bfloat16
        self.end = time.monotonic() + budget_s
        self.copy_gbs: float | None = None

    @property
    def is_late(self) -> bool:
        """Whether the time is used up."""
        return time.monotonic() > self.end

    def milliseconds(self, call: Callable[[], Any]) -> float:
        """Median time of a call, milliseconds, with a cold second-level cache."""
        if self.dry_run:
            start = time.perf_counter()
            call()
            return 1e3 * (time.perf_counter() - start)
        from triton.testing import do_bench

        return float(do_bench(call, warmup=10, rep=60, return_mode="median"))

    def graph_milliseconds(self, call: Callable[[], Any], replays: int = 20) -> float:
        """Median time of a call replayed as a CUDA graph, milliseconds."""
        if self.dry_run:
            return self.milliseconds(call)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                call()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        return self.milliseconds(graph.replay) if replays else 0.0

    def random(self, *shape: int) -> torch.Tensor:
        """Normal numbers of the model's dtype."""
        return torch.randn(shape, dtype=self.dtype, device=self.device)


def significant(number: float) -> float:
    """Four significant digits: ratios of a dry run are far below one."""
    return float(f"{number:.4g}")


def rope(head_dim: int) -> KeyRotation:
    """The rotary embedding of a Llama model."""
    return KeyRotation(1 / 500_000 ** (torch.arange(head_dim // 2) / (head_dim // 2)), head_dim)


def quant_config(nbits: int) -> KVQuantConfig:
    """Keys per channel before RoPE and values per token, groups of 32, min-max ranges."""
    return KVQuantConfig(backend="triton").replace(key={"nbits": nbits}, value={"nbits": nbits})


# ---------------------------------------------------------------- parts


def run_tests(bench: Bench) -> dict[str, Any]:
    """The kernel tests on this device, in a process of their own."""
    if bench.dry_run:
        return {"skipped": "dry run"}
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "tests/ops/triton/kernels"]
    start = time.monotonic()
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
        output, code = done.stdout, done.returncode
    except subprocess.TimeoutExpired as error:
        output, code = str(error.stdout or ""), -1
    passed = re.search(r"(\d+) passed", output)
    return {
        "returncode": code,
        "passed": int(passed[1]) if passed else 0,
        "seconds": round(time.monotonic() - start, 1),
        "tail": "" if code == 0 else output[-4000:],
    }


def measure_bandwidth(bench: Bench) -> dict[str, Any]:
    """Bytes read and written per second by a large copy."""
    size = 1 << (16 if bench.dry_run else 31)
    source = torch.empty(size, dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    bench.copy_gbs = 2 * size / bench.milliseconds(lambda: target.copy_(source)) / 1e6
    return {"copy_gb_per_s": round(bench.copy_gbs, 1)}


def attention_shapes(bench: Bench) -> Iterator[tuple[int, int, int, int]]:
    """`(head_dim, GQA, batch, context)`; the dense keys and values of each fit beside the packed ones."""
    if bench.dry_run:
        yield 32, 4, 1, 260
        return
    pairs = [
        (1, 4096),
        (1, 32768),
        (1, 131072),
        (8, 4096),
        (8, 32768),
        (8, 131072),
        (16, 32768),
        (64, 4096),
        (64, 32768),
    ]
    for head_dim in (128, 64):
        for ratio in (4, 8):
            for batch, context in pairs:
                yield head_dim, ratio, batch, context


def flash_milliseconds(
    bench: Bench, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> dict[str, float]:
    """Dense attention in bf16 in its fastest form: query heads of a group as rows, the best of torch's kernels."""
    if bench.dry_run:
        return {"math": bench.milliseconds(lambda: F.scaled_dot_product_attention(query, keys, values))}
    from torch.nn.attention import SDPBackend, sdpa_kernel

    found = {}
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):
        with sdpa_kernel(backend):
            try:
                found[backend.name.lower()] = bench.milliseconds(
                    lambda: F.scaled_dot_product_attention(query, keys, values)
                )
            except RuntimeError as error:
                print(f"{backend.name}: {str(error).splitlines()[0]}")
    return found


def attention_row(
    bench: Bench, layer: QuantLayer, query: torch.Tensor, dense: dict[str, float], nbits: int
) -> dict[str, Any]:
    """One packed layer against the dense times of its shape."""
    view = layer.view()

    def attend() -> torch.Tensor:
        return decode_attention(query, view)

    eager, graph = bench.milliseconds(attend), bench.graph_milliseconds(attend)
    parts, _ = layer.memory()
    packed = sum(size for name, size in parts.items() if name != "unused")
    fastest = min(dense.values())
    flash = dense.get("flash_attention", fastest)
    rate = packed / graph / 1e6
    return {
        "quant": f"k{nbits}v{nbits}",
        "head_dim": query.shape[3],
        "gqa": query.shape[1] // view.key_shape[1],
        "batch": query.shape[0],
        "context": view.kv_len,
        "milliseconds": round(eager, 4),
        "graph_milliseconds": round(graph, 4),
        "baseline": "flash bf16",
        "baseline_milliseconds": round(flash, 4),
        "fastest_dense_milliseconds": round(fastest, 4),
        "speedup": significant(flash / graph),
        "speedup_eager": significant(flash / eager),
        "speedup_over_fastest_dense": significant(fastest / graph),
        "gb_per_s": significant(rate),
        "share_of_copy": round(rate / bench.copy_gbs, 3) if bench.copy_gbs else None,
    }


def measure_attention(bench: Bench) -> list[dict[str, Any]]:
    """Decode attention at 2, 4 and 8 bits against dense attention in bf16."""
    heads, rows = (1 if bench.dry_run else 8), []
    for head_dim, ratio, batch, context in tqdm(list(attention_shapes(bench)), desc="attention"):
        if bench.is_late:
            print("out of time: the remaining attention shapes are left out")
            break
        keys, values = bench.random(batch, heads, context, head_dim), bench.random(batch, heads, context, head_dim)
        query = bench.random(batch, heads * ratio, 1, head_dim)
        dense = flash_milliseconds(bench, query.view(batch, heads, ratio, head_dim), keys, values)
        for nbits in (4, 2, 8):
            layer = QuantLayer(quant_config(nbits), rope(head_dim))
            layer.update(keys, values)
            rows.append(attention_row(bench, layer, query, dense, nbits))
    return rows


def measure_quantization(bench: Bench) -> list[dict[str, Any]]:
    """Quantize and pack of a prompt's keys and values, and of one flush."""
    shapes = [(1, 1, 64, 32)] if bench.dry_run else [(1, 8, 16384, 128), (16, 8, 4096, 128), (64, 8, 32, 128)]
    rows = []
    for batch, heads, tokens, head_dim in shapes:
        for nbits in (2, 4, 8):
            layer = QuantLayer(quant_config(nbits), rope(head_dim))
            states = bench.random(batch, heads, tokens, head_dim)
            layer.update(states, states)
            stores = layer._block_stores()
            for side, store, rotation in (("key", stores[0], layer.rotation), ("value", stores[1], None)):
                took = bench.milliseconds(functools.partial(encode_blocks, store, states, 4, 4, rotation))
                moved = states.numel() * (states.element_size() + nbits / 8 + 1 / 8)
                rows.append(
                    {
                        "side": side,
                        "nbits": nbits,
                        "batch": batch,
                        "tokens": tokens,
                        "milliseconds": round(took, 4),
                        "gb_per_s": round(moved / took / 1e6, 1),
                    }
                )
    return rows


def llama(bench: Bench) -> Any:
    """A randomly initialised model of the shape of Llama-3-8B (tiny in a dry run)."""
    from transformers import LlamaConfig, LlamaForCausalLM

    settings: dict[str, Any] = {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    }
    if bench.dry_run:
        settings |= {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
        settings |= {"num_attention_heads": 2, "num_key_value_heads": 1}
    settings["attn_implementation"] = "sdpa"
    config = LlamaConfig(**settings)
    default = torch.get_default_dtype()
    torch.set_default_dtype(bench.dtype)
    try:
        with bench.device:
            return LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(default)


def filled(cache: Any, model: Any, bench: Bench, batch: int, context: int) -> Any:
    """The cache with random keys and values of `context` tokens, as a prompt would leave it."""
    config = model.config
    head_dim = config.hidden_size // config.num_attention_heads
    for layer in range(config.num_hidden_layers):
        states = bench.random(batch, config.num_key_value_heads, context, head_dim)
        cache.update(states, states.clone(), layer)
    return cache


@torch.inference_mode()
def measure_generation(bench: Bench) -> list[dict[str, Any]]:
    """Decode steps of a whole model: tokens per second and peak memory, eager and as a CUDA graph."""
    from transformers import DynamicCache

    model = llama(bench)
    rows: list[dict[str, Any]] = []
    steps = 1 if bench.dry_run else 12
    shapes = [(1, 200)] if bench.dry_run else [(1, 32768), (16, 16384), (64, 8192)]
    for batch, context in shapes:
        baseline: dict[str, Any] | None = None
        for name in ("dynamic", "k4v4", "k2v2"):
            if bench.is_late:
                print("out of time: the remaining models are left out")
                return rows
            if not bench.dry_run:
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            cache = (
                DynamicCache(config=model.config)
                if name == "dynamic"
                else QuantCache(model.config, quant_config(int(name[1])))
            )
            # Two tokens short of a whole block, the window takes all steps without a flush.
            filled(cache, model, bench, batch, context // 32 * 32 + 4)
            tokens = torch.zeros(batch, 1, dtype=torch.long, device=bench.device)

            def step(cache: Any = cache, tokens: torch.Tensor = tokens) -> Any:
                return model(tokens, past_key_values=cache, use_cache=True).logits

            step()
            times = [step_milliseconds(bench, step) for _ in range(steps)]
            took = statistics.median(times)
            row: dict[str, Any] = {
                "model": "llama-3-8b-shape",
                "quant": name,
                "batch": batch,
                "context": context,
                "tokens_per_s": round(1e3 * batch / took, 1),
                "milliseconds": round(took, 3),
                "kv_bytes": cache.memory_report().total_bytes if isinstance(cache, QuantCache) else None,
                "peak_bytes": 0 if bench.dry_run else torch.cuda.max_memory_allocated(),
            }
            try:
                row["graph_milliseconds"] = round(bench.graph_milliseconds(step), 3)
            except RuntimeError as error:  # a step that synchronizes cannot be captured
                row["graph_milliseconds"], row["graph_error"] = None, str(error).splitlines()[0]
            if baseline is None:
                baseline = row
            row["baseline"] = "dynamic bf16"
            row["ratio"] = round(baseline["milliseconds"] / row["milliseconds"], 3)
            both = row["graph_milliseconds"], baseline["graph_milliseconds"]
            row["graph_ratio"] = round(both[1] / both[0], 3) if all(both) else None
            rows.append(row)
            print(row)
            del cache, step
    return rows


def step_milliseconds(bench: Bench, step: Callable[[], Any]) -> float:
    """One decode step, milliseconds, the device idle before and after."""
    if not bench.dry_run:
        torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    if not bench.dry_run:
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start)


# ---------------------------------------------------------------- report


def targets_met(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The worst long case of each preset with a target, head size 128."""
    long = [row for row in rows if row["batch"] * row["context"] >= LONG and row["head_dim"] == 128]
    met: dict[str, Any] = {}
    for quant, wanted in TARGETS.items():
        found = [row for row in long if row["quant"] == quant]
        if found:
            worst = min(found, key=lambda row: row["speedup"])
            met[quant] = {"wanted": wanted, "worst": worst["speedup"], "met": worst["speedup"] >= wanted}
    shares = [row["share_of_copy"] for row in long if row["quant"] == "k4v4" and row["share_of_copy"]]
    if shares:
        met["k4v4 share of copy"] = {"wanted": 0.7, "worst": min(shares), "met": min(shares) >= 0.7}
    return met


def print_attention(rows: list[dict[str, Any]]) -> None:
    print(
        f"{'quant':>6} {'D':>4} {'GQA':>4} {'batch':>6} {'context':>8} {'graph ms':>9} {'flash ms':>9} "
        f"{'speed-up':>9} {'GB/s':>7} {'of copy':>8}"
    )
    for row in rows:
        share = "" if row["share_of_copy"] is None else f"{row['share_of_copy']:.0%}"
        print(
            f"{row['quant']:>6} {row['head_dim']:>4} {row['gqa']:>4} {row['batch']:>6} {row['context']:>8} "
            f"{row['graph_milliseconds']:>9.4f} {row['baseline_milliseconds']:>9.4f} {row['speedup']:>9.2f} "
            f"{row['gb_per_s']:>7.0f} {share:>8}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="where to write the results")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="parts to run")
    parser.add_argument("--budget", type=float, default=540, help="seconds after which nothing new is started")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes in Triton's interpreter, on the CPU")
    options = parser.parse_args()
    if options.dry_run:
        if os.environ.get("TRITON_INTERPRET") != "1":
            parser.error("--dry-run needs TRITON_INTERPRET=1, set before Python starts")
        from tests.ops.triton.kernels import emulation

        emulation.install()
    elif not torch.cuda.is_available():
        parser.error("there is no CUDA device; --dry-run runs the same code on tiny shapes")
    torch.manual_seed(0)
    bench = Bench(options.dry_run, options.budget)
    results: dict[str, Any] = {"environment": run_environment(bench.device), "dry_run": options.dry_run}
    parts = {
        "bandwidth": measure_bandwidth,
        "attention": measure_attention,
        "quantize": measure_quantization,
        "generate": measure_generation,
        "tests": run_tests,
    }
    # Numbers first: the tests compile many variants and may use up the rest of the time.
    for name in (part for part in parts if part in options.only):
        print(f"--- {name}", flush=True)
        results[name] = parts[name](bench)
        if name == "attention":
            print_attention(results[name])
            results["targets"] = targets_met(results[name])
            print(json.dumps(results["targets"], indent=1))
        if options.json:  # after each part, so that a run that is cut off leaves what it has
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(json.dumps(results, indent=1) + "\n")
    failed = results.get("tests", {}).get("returncode", 0)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
