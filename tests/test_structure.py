"""The shape of the package: light imports, one direction, sorted public names."""

import ast
import subprocess
import sys
from pathlib import Path

import kvquant_hf

PACKAGE = Path(kvquant_hf.__file__).parent
# Modules may import from those further right only; modules of one entry stand side by side.
LAYERS = [
    {"serialization"},
    {"cache"},
    {"layer_state"},
    {"rope_probe", "memory", "attention", "query_moments", "capture", "misuse"},
    {"model_shell", "layer"},
    {"block_layer"},
    {"guard", "stored_layer"},
    {"last_queries", "lazy", "other_layers", "padding"},
    {"ops"},
    {"view"},
    {"storage", "window"},
    {"blocks", "block_state"},
    {"quantizers"},
    {"presets", "rope", "rotation", "packing", "buffers"},
    {"config"},
    {"spec"},
    {"checks"},
]


def imports_of(path: Path) -> list[ast.ImportFrom | ast.Import]:
    """Imports executed when the module is loaded: those within functions and `if TYPE_CHECKING` are left out."""
    found = []
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            found.append(node)
    return found


def module_name(dotted: str) -> str:
    return dotted.split(".")[1] if dotted.startswith("kvquant_hf.") else ""


def test_imports_follow_the_data():
    rank = {name: level for level, names in enumerate(LAYERS) for name in names}
    for path in PACKAGE.rglob("*.py"):
        own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if own not in rank:
            continue
        for node in imports_of(path):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kvquant_hf."):
                other = module_name(node.module)
                if other not in (own, "_compat"):
                    assert rank[own] < rank[other], f"{path.name} imports {node.module}"


def test_every_module_of_the_core_has_its_place():
    known = set.union(*LAYERS) | {"__init__", "_compat", "analysis", "eval", "configs"}
    modules = {path.stem for path in PACKAGE.glob("*.py")} | {
        path.name for path in PACKAGE.iterdir() if path.is_dir() and (path / "__init__.py").exists()
    }
    assert modules <= known, modules - known


def test_analysis_stands_on_top():
    """It may import everything; nothing imports it."""
    for path in PACKAGE.rglob("*.py"):
        if path.relative_to(PACKAGE).parts[0] != "analysis":
            assert "kvquant_hf.analysis" not in path.read_text(), path


def test_ops_know_no_transformers():
    for path in (PACKAGE / "ops").rglob("*.py"):
        assert "import transformers" not in path.read_text(), path
        assert "from transformers" not in path.read_text(), path


def test_only_compat_asks_for_versions():
    recorders = {"environment.py"}  # writes versions beside results, decides nothing by them
    for path in PACKAGE.rglob("*.py"):
        if path.name != "_compat.py" and path.name not in recorders:
            text = path.read_text()
            assert "__version__" not in text.replace('__version__ = "', ""), path
            assert "packaging" not in text, path
            assert "importlib.metadata" not in text, path


def test_public_names_are_sorted_and_there():
    assert list(kvquant_hf.__all__) == sorted(kvquant_hf.__all__)
    for name in kvquant_hf.__all__:
        assert getattr(kvquant_hf, name).__doc__, name


def test_importing_does_nothing():
    """No registration, no patch, no CUDA, no Triton, no environment variable, no modeling code."""
    code = """
import os, sys
before = dict(os.environ)
sys.modules["triton"] = None  # any import of it raises
import torch, transformers
from transformers import AttentionInterface
names = set(AttentionInterface._global_mapping)
threads = torch.get_num_threads()
loaded = {m for m in sys.modules if ".modeling_" in m}
import kvquant_hf
assert dict(os.environ) == before
assert set(AttentionInterface._global_mapping) == names
assert torch.get_num_threads() == threads
assert not torch.cuda.is_initialized()
families = {m for m in sys.modules if ".models." in m and ".modeling_" in m and ".models.auto." not in m}
assert families <= loaded, families - loaded
kvquant_hf.register_attention(); kvquant_hf.register_attention()
assert "kvquant" in AttentionInterface._global_mapping
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=PACKAGE.parent, timeout=120)
