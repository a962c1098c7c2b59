"""A19: a stated range of Transformers versions, one per-layer API, no deprecated calls."""

import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from harness import (
    CACHE_KW,
    GENERATE_KWS,
    PASSES_POSITIONS,
    Q,
    assert_lengths,
    forward,
    quant_cache,
    random_ids,
    settings,
)
from tiny_models import tiny_model
from transformers import Cache, DynamicCache
from transformers.cache_utils import CacheLayerMixin

REPOSITORY = Path(__file__).parents[2]


def test_a19_the_argument_name_is_found():
    from kvquant_hf import _compat

    assert _compat.CACHE_KW == CACHE_KW


@pytest.mark.filterwarnings("ignore:.*past_key_values.*:FutureWarning")
@pytest.mark.parametrize("quant", [Q, settings(residual=4096)], ids=["K4V4", "lossless"])
def test_a19_every_generate_keyword_gives_the_same_ids(quant):
    model = tiny_model("llama")
    ids = random_ids(2, 60)
    out = []
    for keyword in GENERATE_KWS:
        cache = quant_cache(model, quant)
        out.append(
            model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False, **{keyword: cache}
            )
        )
        assert cache.get_seq_length() == 79
    assert len(out) == (2 if PASSES_POSITIONS else 1)
    for other in out[1:]:
        assert torch.equal(out[0], other)


def test_a19_no_warning_comes_from_the_package():
    model = tiny_model("llama")
    ids = random_ids(1, 60)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cache = quant_cache(model)
        model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False, num_beams=2,
            **{CACHE_KW: cache},
        )  # fmt: skip
        cache.crop(-3)
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([0, 1]))
        cache.get_mask_sizes(1, 0)
        cache.get_max_length()
        cache.memory_report()
        repr(cache)
        cache.reset()
    ours = [str(item.message) for item in caught if "kvquant_hf" in item.filename]
    deprecations = [
        f"{item.filename}: {item.message}"
        for item in caught
        if issubclass(item.category, FutureWarning | DeprecationWarning)
    ]
    assert not ours, ours
    assert not deprecations, deprecations


def test_a19_is_a_cache_of_layers():
    model = tiny_model("llama")
    cache = quant_cache(model)
    assert isinstance(cache, Cache)
    assert not isinstance(cache, DynamicCache), "generate treats DynamicCache specially"
    assert all(isinstance(layer, CacheLayerMixin) for layer in cache.layers)
    assert cache.is_compileable is False


@pytest.mark.parametrize("state", ["new", "filled", "reset", "cropped"])
def test_a19_truthy_in_every_state(state):
    model = tiny_model("llama")
    cache = quant_cache(model)
    if state != "new":
        forward(model, random_ids(1, 60), cache)
    if state == "reset":
        cache.reset()
    if state == "cropped":
        cache.crop(-60)
    assert bool(cache) is True
    assert len(cache) == 2


@pytest.mark.parametrize("length", [0, 1, 20, 36, 90])
def test_a19_mask_sizes_include_the_query(length):
    model = tiny_model("llama")
    cache = quant_cache(model)
    if length:
        forward(model, random_ids(1, length), cache)
    assert_lengths(cache, length)
    for query_length in (1, 2, 17, 300):
        assert cache.get_mask_sizes(query_length, 1) == (length + query_length, 0)
    assert cache.get_max_length() == -1


@pytest.mark.parametrize("found", ["5.16.0"])
def test_a19_a_version_below_the_range_is_named(found):
    code = f"""
import importlib.metadata as metadata
import transformers
real = metadata.version
metadata.version = lambda name: {found!r} if name == "transformers" else real(name)
transformers.__version__ = {found!r}
try:
    import kvquant_hf
except ImportError as error:
    assert {found!r} in str(error) and "5.17" in str(error), error
    print("refused")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.stdout.strip() == "refused", done.stderr[-2000:]


def test_a19_only_compat_asks_for_a_version():
    """No other module of the package compares versions."""
    offenders = [
        str(path.relative_to(REPOSITORY))
        for path in sorted((REPOSITORY / "kvquant_hf").rglob("*.py"))
        if path.name != "_compat.py"
        and any(word in path.read_text(encoding="utf-8") for word in ("transformers.__version__", "packaging.version"))
    ]
    assert not offenders, offenders
