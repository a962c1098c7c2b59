"""What the compiler makes of the decode kernel, without a GPU: registers, spills, shared memory, SASS per element.

    python benchmarks/triton_aot.py                 # every shipped configuration, prints a table and writes JSON
    python benchmarks/triton_aot.py --subset        # a representative few, as the tests do
    python benchmarks/triton_aot.py --variants      # other kernels and settings: do they compile, do they spill

Needs Triton with its bundled assembler, no driver; `TRITON_INTERPRET` must not be set. Elements are those of one tile
of keys plus one of values; instructions are those of the loop over packed tiles, one count per thread. They say what
the issue slots of a multiprocessor are spent on, not how long anything takes.
"""

import argparse
import contextlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
os.environ.setdefault("TRITON_CACHE_DIR", tempfile.mkdtemp(prefix="triton-aot-"))

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability
from triton.compiler import ASTSource

from kvquant_hf.config import KVQuantConfig
from kvquant_hf.layer import QuantLayer
from kvquant_hf.ops.triton import launch as launching
from kvquant_hf.ops.triton import planar
from kvquant_hf.ops.triton import quantize as quantizing
from kvquant_hf.ops.triton.tuning import Launch, launch_parameters
from kvquant_hf.rope import KeyRotation
from kvquant_hf.view import KVView

# Shared memory that one program may have, bytes.
SHARED_LIMIT = {"80": 163 << 10, "90": 227 << 10, "100": 227 << 10, "gfx942": 64 << 10}
_TYPES = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.int16: "*i16",
    torch.uint8: "*u8",
}


def example(
    head_dim: int,
    nbits: tuple[int, int],
    rows: int,
    undone: KeyRotation | None,
    dtype: torch.dtype = torch.bfloat16,
    padding: list[int] | None = None,
    promoted: float = 0.0,
    values: dict[str, Any] | None = None,
    **both: Any,
) -> tuple[torch.Tensor, QuantLayer]:
    """A query and a small layer with the shapes and strides of a real one."""
    config = KVQuantConfig(backend="triton").replace(
        key={"nbits": nbits[0], "promoted": promoted, **both}, value={"nbits": nbits[1], **both, **(values or {})}
    )
    layer = QuantLayer(config, undone)
    if padding is not None:
        layer.set_padding(torch.tensor(padding))
    states = torch.zeros(2, 8, 1024, head_dim, dtype=dtype)
    layer.update(states, states)
    return torch.zeros(2, 8 * rows, 1, head_dim, dtype=dtype), layer


def rope(head_dim: int, width: int, offset: int = 0, pairing: Any = "half") -> KeyRotation:
    """A rotary embedding of `width` channels."""
    return KeyRotation(1 / 10000 ** (torch.arange(width // 2) / (width // 2)), head_dim, offset, pairing)


def source_of(kernel: Any, arguments: dict[str, Any]) -> Any:
    """The kernel specialized as the launcher would specialize it for these arguments."""
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for index, parameter in enumerate(kernel.params):
        value, name = arguments[parameter.name], parameter.name
        if parameter.is_constexpr or (not parameter.do_not_specialize and isinstance(value, int) and value == 1):
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name] = _TYPES[value.dtype]
            attributes[(index,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[name] = "fp32"
        else:
            signature[name] = "i32"
            if not parameter.do_not_specialize and value % 16 == 0:
                attributes[(index,)] = [["tt.divisibility", 16]]
    return ASTSource(kernel, signature, constexprs=constants, attrs=attributes)


def compiled(kernel: Any, arguments: dict[str, Any], arch: str, launch: Launch) -> Any:
    """The kernel compiled for `80`, `90`, `100` (NVIDIA) or `gfx942` (AMD)."""
    options = {"num_warps": launch.num_warps}
    if launch.max_registers is not None and arch.isdigit():
        options["maxnreg"] = launch.max_registers
    target = GPUTarget("cuda", int(arch), 32) if arch.isdigit() else GPUTarget("hip", arch, 64)
    return triton.compile(source_of(kernel, arguments), target=target, options=options)


def nvidia_facts(binary: Any, arch: str) -> dict[str, Any]:
    """Registers and spills from the assembler, loads and products from PTX, the loop from SASS."""
    ptx = binary.asm["ptx"]
    ptxas = get_ptxas(int(arch)).path
    with tempfile.TemporaryDirectory() as directory:
        source, cubin = Path(directory) / "k.ptx", Path(directory) / "k.cubin"
        source.write_text(ptx)
        command = [ptxas, "-v", f"--gpu-name={sm_arch_from_capability(int(arch))}", str(source), "-o", str(cubin)]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        disassembler = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
        sass = subprocess.run([disassembler, "-c", str(cubin)], capture_output=True, text=True, check=True).stdout
    stores = _number(r"(\d+) bytes spill stores", report)
    loads = _number(r"(\d+) bytes spill loads", report)
    return {
        "registers": _number(r"Used (\d+) registers", report),
        "spilled_bytes": stores + loads,
        "wide_loads": len(re.findall(r"cp\.async\.cg\.shared\.global|ld\.global[.\w]*\.v4\.b32", ptx)),
        "tensor_core": bool(re.search(r"mma\.sync|wgmma|tcgen05\.mma", ptx)),
        "loop": packed_loop(sass),
    }


def packed_loop(sass: str) -> dict[str, int]:
    """Instructions of the innermost loop with the most half-precision arithmetic, by mnemonic."""
    labels: dict[str, int] = {}
    code: list[tuple[str, str]] = []
    for line in sass.splitlines():
        label = re.match(r"^(\.L_x?[\w]*):", line.strip())
        if label:
            labels[label[1]] = len(code)
        found = re.match(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)(.*)", line)
        if found:
            code.append((found[1], found[2]))
    loops = []
    for end, (mnemonic, operands) in enumerate(code):
        target = re.search(r"`\((\.L_x?\w*)\)", operands)
        if mnemonic.startswith("BRA") and target and labels.get(target[1], end + 1) <= end:
            loops.append(code[labels[target[1]] : end + 1])
    if not loops:
        return {}
    half = [sum(name.startswith(("HFMA2", "HMUL2", "HADD2")) for name, _ in loop) for loop in loops]
    most = max(half)
    best = min((loop for loop, count in zip(loops, half, strict=True) if count >= most / 2), key=len)
    return dict(Counter(name.split(".")[0] for name, _ in best).most_common())


def _number(pattern: str, text: str) -> int:
    """The number that a report of the compiler gives."""
    found = re.search(pattern, text)
    if found is None:
        raise ValueError(f"The compiler's report has no {pattern!r}.")
    return int(found[1])


def amd_facts(binary: Any) -> dict[str, Any]:
    """Registers and spills from the assembly."""
    text = binary.asm["amdgcn"]
    return {
        "registers": _number(r"\.vgpr_count:\s+(\d+)", text),
        "spilled_bytes": 4 * _number(r"\.vgpr_spill_count:\s+(\d+)", text),
        "wide_loads": len(re.findall(r"(?:global|buffer)_load_dwordx4", text)),
        "tensor_core": "v_mfma" in text,
        "loop": {},
    }


def measure(case: dict[str, Any], launch: Launch | None = None) -> dict[str, Any]:
    """Compile one configuration and collect what is known about it."""
    arch, head_dim, nbits, rows = case["arch"], case["head_dim"], case["nbits"], case["rows"]
    if launch is None:
        launch = launch_parameters(head_dim, min(nbits), arch)
    from kvquant_hf.ops.triton.decode_kernel import decode_split_kernel

    query, layer = example(head_dim, nbits, rows, rope(head_dim, head_dim) if case["rotary"] else None)
    _, arguments = launching.split_arguments(query, layer.view(), None, head_dim**-0.5, launch)
    arguments["ASM"] = arch.isdigit()
    with contextlib.redirect_stdout(io.StringIO()):
        binary = compiled(decode_split_kernel, arguments, arch, launch)
    facts = nvidia_facts(binary, arch) if arch.isdigit() else amd_facts(binary)
    threads = launch.num_warps * (32 if arch.isdigit() else 64)
    elements = 2 * launch.BN * head_dim
    total = sum(facts["loop"].values())
    return {
        **case,
        **vars(launch),
        "shared_bytes": binary.metadata.shared,
        "shared_limit": SHARED_LIMIT[arch],
        **facts,
        "instructions_per_element": round(total * threads / elements, 2) if total else None,
    }


def cases(subset: bool) -> list[dict[str, Any]]:
    """Configurations to compile."""
    if subset:
        shapes = [(64, (4, 4), 4, True), (128, (2, 2), 4, True), (128, (4, 4), 8, True), (256, (4, 4), 4, True)]
        picked = [(shape, "90") for shape in shapes] + [(shapes[2], arch) for arch in ("80", "100", "gfx942")]
    else:
        widths = [(2, 2), (3, 3), (4, 4), (4, 2), (8, 8)]
        shapes = [(d, bits, 4, True) for d in (64, 128, 256) for bits in widths]
        shapes += [(128, (4, 4), 16, True), (128, (4, 4), 4, False), (128, (2, 2), 4, False)]
        picked = [(shape, arch) for shape in shapes for arch in ("80", "90", "100")]
        picked += [(shape, "gfx942") for shape in shapes if shape[0] <= 128 and shape[1] in ((2, 2), (4, 4))]
    return [
        {"arch": arch, "head_dim": d, "nbits": bits, "rows": rows, "rotary": rotary}
        for (d, bits, rows, rotary), arch in picked
    ]


def variants() -> Iterator[tuple[str, str, Any, dict[str, Any], Launch]]:
    """Architecture, name, kernel, arguments and launch of what the table leaves out: every branch of the kernels."""
    from kvquant_hf.ops.triton.combine_kernel import combine_kernel
    from kvquant_hf.ops.triton.decode_kernel import decode_split_kernel
    from kvquant_hf.ops.triton.planar_kernel import planar_split_kernel

    boolean, additive = torch.ones(2, 1, 1, 1024, dtype=torch.bool), torch.zeros(2, 1, 1, 1024, dtype=torch.float16)
    decodes: list[tuple[str, Any, torch.Tensor | None]] = [
        ("d80 k3v8, partial RoPE, boolean mask", example(80, (3, 8), 1, rope(80, 32), torch.float16), boolean),
        ("d16 k2v2 symmetric, additive mask", example(16, (2, 2), 3, rope(16, 16), symmetric=True), additive),
        (
            "padded, interleaved",
            example(64, (8, 3), 2, rope(64, 24, 8, "interleaved"), torch.float32, [100, 0]),
            boolean,
        ),
        ("Hadamard, groups of 16", example(128, (4, 2), 4, None, group_size=16, rotation="hadamard"), None),
        (
            "k3v3 symmetric, groups of 128",
            example(128, (3, 3), 4, rope(128, 128), symmetric=True, group_size=128),
            None,
        ),
        ("k16v4", example(64, (16, 4), 4, None), None),
        ("k4v16", example(128, (4, 16), 4, rope(128, 128)), None),
        (
            "factors, groups of 128",
            example(128, (4, 2), 4, rope(128, 128), group_size=128, method="variance_normalized"),
            None,
        ),
        *((f"promoted {name}", case, None) for name, case in promoted_examples()),
        *((f"bytes {name}", case, None) for name, case in byte_examples()),
    ]
    for name, (query, layer), mask in decodes:
        view = layer.view()
        launch = launch_parameters(query.shape[3], min(view.key_store.spec.nbits, view.value_store.spec.nbits), "90")
        _, arguments = launching.split_arguments(query, view, mask, 0.1, launch)
        everywhere = view.key_store.spec.promotes or view.value_store.spec.has_second_level
        for arch in ("80", "90", "gfx942") if everywhere else ("90",):
            if arch.isdigit() or query.shape[3] <= 128:  # as in the table
                arguments["ASM"] = arch.isdigit()
                yield arch, f"decode {name}", decode_split_kernel, arguments, launch
        if view.value_store.spec.rotation == "hadamard" or mask is additive:
            yield "90", f"combine {name}", combine_kernel, combining(query, view, arguments), launch
    for name, (query, layer), mask in planar_examples(boolean, additive):
        view, launch = layer.view(), Launch(0, 0, 4, 1)
        _, arguments = planar.split_arguments(query, view, mask, 0.1)
        for arch in ("80", "90", "gfx942") if name.startswith(("kvquant2", "rotatekv2")) else ("80", "90"):
            yield arch, f"planar {name}", planar_split_kernel, arguments, launch
        if view.value_store.spec.rotation == "hadamard_signs" or view.value_store.spec.channel_order:
            yield "90", f"combine {name}", combine_kernel, combining(query, view, arguments), launch
    states = torch.zeros(2, 8, 1024, 128, dtype=torch.bfloat16)
    for bits, symmetric, value_rotation in ((4, False, "hadamard"), (3, True, "none"), (2, False, "none")):
        _, layer = example(128, (bits, bits), 1, rope(128, 128), symmetric=symmetric)
        for store, rotation in zip(layer._block_stores(), (layer.rotation, None), strict=True):
            if store.spec.granularity == "per_token":
                store.spec = replace(store.spec, rotation=value_rotation)
            _, arguments = quantizing.quantize_arguments(store, states, 4, rotation)
            launch = Launch(0, 0, 4, 1)
            yield "90", f"quantize {store.spec}", quantizing._kernel(store), arguments, launch


def combining(query: torch.Tensor, view: KVView, arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `combine_kernel` after a decode kernel that had these."""
    output = torch.empty(query.shape, dtype=query.dtype)
    return launching.combine_arguments(arguments["partial"], arguments["partial_lse"], output, view)


def planar_examples(
    boolean: torch.Tensor, additive: torch.Tensor
) -> Iterator[tuple[str, tuple[torch.Tensor, QuantLayer], torch.Tensor | None]]:
    """The presets of the common layout, and every branch that none of them takes."""
    for name, undone in (
        ("fp8", None),
        ("nvfp4", None),
        ("turboquant3", None),
        ("innerq3", None),
        ("kvquant2", rope(128, 128)),
        ("rotatekv2", rope(128, 128)),
    ):
        config = KVQuantConfig.resolve(name, backend="triton")
        layer = QuantLayer(config, undone)
        states = torch.zeros(2, 8, 1024, 128, dtype=torch.bfloat16)
        layer.update(states, states)
        yield f"{name} d128", (torch.zeros(2, 32, 1, 128, dtype=torch.bfloat16), layer), None
    per_token: dict[str, Any] = {"granularity": "per_token"}
    per_channel: dict[str, Any] = {"granularity": "per_channel"}
    yield "padded, partial RoPE", example(80, (3, 8), 1, rope(80, 32), torch.float16, [100, 0], **per_token), boolean
    table = {"levels": "gaussian", "symmetric": True}
    yield "promoted, tables", example(96, (2, 3), 16, rope(96, 96), promoted=0.25, values=table), additive
    turned: dict[str, Any] = {"outliers": 0.01, "rotation": "hadamard_signs", **per_channel}
    yield "outliers in a basis", example(64, (2, 4), 4, None, torch.float32, values=turned, outliers=0.02), None
    ordered: dict[str, Any] = {"rotation": "hadamard", "channel_order": list(range(63, -1, -1)), **per_token}
    yield "ordered", example(64, (2, 4), 4, rope(64, 64), **ordered), None
    hybrid = {"method": "innerq", **per_channel}
    yield "hybrid", example(64, (3, 4), 4, rope(64, 24, 8, "interleaved"), method="innerq", values=hybrid), None
    yield "d256 k8v2 per token", example(256, (8, 2), 4, rope(256, 256), **per_token), None
    yield "d18 k16v4", example(18, (16, 4), 4, None, torch.float16, values=per_channel), None


def promoted_examples() -> Iterator[tuple[str, tuple[torch.Tensor, QuantLayer]]]:
    """Keys with promoted channels, all head sizes and widths among them."""
    yield "d64 k2v2, a quarter, groups of 64", example(64, (2, 2), 4, rope(64, 64), promoted=0.25, group_size=64)
    yield "d128 k2v3, half, groups of 64", example(128, (2, 3), 4, rope(128, 128), promoted=0.5, group_size=64)
    yield "d128 k3v4, a quarter, 16 rows", example(128, (3, 4), 16, rope(128, 128), promoted=0.25, group_size=64)
    yield "d128 k4v4, an eighth, post-RoPE", example(128, (4, 4), 4, None, promoted=0.125)
    yield (
        "d80 k3v2, partial RoPE, groups of 16",
        example(80, (3, 2), 4, rope(80, 32, 8, "interleaved"), torch.float16, promoted=0.25, group_size=16),
    )
    yield "d256 k2v4, half, groups of 128", example(256, (2, 4), 4, rope(256, 256), promoted=0.5, group_size=128)


def byte_examples() -> Iterator[tuple[str, tuple[torch.Tensor, QuantLayer]]]:
    """Values with scales of a byte, beside keys with promoted channels or without, all head sizes and widths."""
    rotated = {"symmetric": True, "metadata_nbits": 8, "rotation": "hadamard"}
    quarter: dict[str, Any] = {"promoted": 0.25, "group_size": 64, "values": rotated}
    yield "d64 k2v2", example(64, (2, 2), 4, rope(64, 64), **quarter)
    yield "d96 k2v3", example(96, (2, 3), 4, rope(96, 96), torch.float16, **quarter)
    yield "d128 k2v2", example(128, (2, 2), 4, rope(128, 128), **quarter)
    yield "d128 k3v4, 16 rows", example(128, (3, 4), 16, rope(128, 128), **quarter)
    yield (
        "d256 k2pv4, half, groups of 128",
        example(256, (2, 4), 4, rope(256, 256), promoted=0.5, group_size=128, values=rotated),
    )
    yield "d128 k8v8, groups of 32", example(128, (8, 8), 4, rope(128, 128), values=rotated)


# Bytes that variants are known to spill, by name and chip, see ops/README.md; more is a fault.
KNOWN_SPILLS = {
    ("decode bytes d128 k3v4, 16 rows", "80"): 12,
    ("decode bytes d256 k2pv4, half, groups of 128", "80"): 88,
    ("planar fp8 d128", "90"): 12,
    ("planar kvquant2 d128", "gfx942"): 8,
    ("planar rotatekv2 d128", "gfx942"): 1008,
    ("planar d256 k8v2 per token", "80"): 800,
    ("planar d256 k8v2 per token", "90"): 532,
    ("planar d18 k16v4", "90"): 8,
}


def compile_variants() -> int:
    """Compile all variants, print what each needs, and count those that spill more than is known."""
    spilling = 0
    for arch, name, kernel, arguments, launch in variants():
        with contextlib.redirect_stdout(io.StringIO()):
            binary = compiled(kernel, arguments, arch, launch)
        facts = nvidia_facts(binary, arch) if arch.isdigit() else amd_facts(binary)
        spilling += facts["spilled_bytes"] > KNOWN_SPILLS.get((name, arch), 0)
        print(
            f"{name:<55} {arch:>6} {facts['registers']:>4} registers {facts['spilled_bytes']:>5} bytes spilled "
            f"{binary.metadata.shared:>7} shared",
            flush=True,
        )
    return spilling


def faults(row: dict[str, Any]) -> list[str]:
    """What a configuration must not show."""
    found = []
    if row["spilled_bytes"]:
        found.append(f"spills {row['spilled_bytes']} bytes")
    if row["shared_bytes"] > row["shared_limit"]:
        found.append(f"wants {row['shared_bytes']} bytes of shared memory of {row['shared_limit']}")
    if not row["wide_loads"]:
        found.append("has no 16-byte loads")
    if not row["tensor_core"]:
        found.append("has no tensor core instructions")
    return found


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    """Put rows into a file, in place of older ones of the same configurations."""

    def key(row: dict[str, Any]) -> tuple[Any, ...]:
        return row["arch"].rjust(8), row["head_dim"], tuple(row["nbits"]), row["rows"], row["rotary"]

    old = json.loads(path.read_text())["configurations"] if path.is_file() else []
    table = {key(row): row for row in [*old, *rows]}
    versions = {"triton": triton.__version__, "torch": torch.__version__}
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"versions": versions, "configurations": [table[name] for name in sorted(table)]}
    path.write_text(json.dumps(content, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--subset", action="store_true", help="a representative few")
    parser.add_argument("--arch", nargs="*", help="only these architectures")
    parser.add_argument("--head-dim", nargs="*", type=int, help="only these head sizes")
    parser.add_argument("--json", type=Path, help="where to write the table; rows of other configurations stay")
    parser.add_argument("--variants", action="store_true", help="compile what the table leaves out")
    options = parser.parse_args()
    if options.variants:
        return int(compile_variants() > 0)
    rows = []
    print(
        f"{'arch':>7} {'D':>4} {'K/V':>5} {'rows':>4} {'RoPE':>4} {'BN':>4} {'warps':>5} {'st':>2} "
        f"{'regs':>4} {'spill':>5} {'shared':>7} {'i/elt':>5}  faults"
    )
    chosen = [
        case
        for case in cases(options.subset)
        if (not options.arch or case["arch"] in options.arch)
        and (not options.head_dim or case["head_dim"] in options.head_dim)
    ]
    for case in chosen:
        row = measure(case)
        rows.append(row)
        per_element = "" if row["instructions_per_element"] is None else f"{row['instructions_per_element']:.2f}"
        print(
            f"{row['arch']:>7} {row['head_dim']:>4} {row['nbits'][0]}/{row['nbits'][1]:<3} {row['rows']:>4} "
            f"{'yes' if row['rotary'] else 'no':>4} {row['BN']:>4} {row['num_warps']:>5} {row['num_stages']:>2} "
            f"{row['registers']:>4} {row['spilled_bytes']:>5} {row['shared_bytes']:>7} {per_element:>5}  "
            f"{', '.join(faults(row))}",
            flush=True,
        )
        if options.json:  # after each row: a run that is cut off leaves what it has
            write(options.json, rows)
    return int(any(faults(row) for row in rows))


if __name__ == "__main__":
    sys.exit(main())
