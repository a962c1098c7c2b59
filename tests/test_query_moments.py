"""Rounding by the queries: moments, feedback, codes, and a cache that uses them."""

import itertools

import pytest
import torch
from harness import CACHE_KW
from tiny_models import tiny_model

from kvquant_hf import KVQuantConfig, QuantCache, QuantSpec, QueryMoments
from kvquant_hf.ops import cpu
from kvquant_hf.quantizers import QUANTIZERS
from kvquant_hf.query_moments import load_once
from kvquant_hf.rope import KeyRotation
from kvquant_hf.rotation import hadamard
from kvquant_hf.storage import BlockStore

D, H, L = 32, 2, 32
KEY_METHODS = sorted(set(QUANTIZERS) - {"turboquant", "turboquant_prod"})  # which store tokens, not channels
QUANT = {"key": {"nbits": 2, "group_size": 16}, "value": {"group_size": 16}, "residual_length": 16}


def random_moments(head_dim: int = D, heads: int = H, layers: int = 2, rank: int = 4) -> QueryMoments:
    """Queries that favour `rank` directions."""
    generator = torch.Generator().manual_seed(0)
    found = {}
    for layer_idx in range(layers):
        queries = torch.randn(heads, rank, head_dim, generator=generator)
        queries = torch.cat([4 * queries, 0.1 * torch.eye(head_dim).expand(heads, -1, -1)], 1)
        found[layer_idx] = queries.transpose(-1, -2) @ queries
    return QueryMoments(found, 1000)


def ids(rows: int, tokens: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(1, 128, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def weighted_error(error: torch.Tensor, moment: torch.Tensor) -> float:
    """Mean of `eᵀ M e` for errors `[B, H, n, D, L]`."""
    return float(torch.einsum("bhndl,hde,bhnel->", error.double(), moment.double(), error.double()))


# ---- the rounding ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KEY_METHODS)
@pytest.mark.parametrize(("nbits", "symmetric"), list(itertools.product((2, 3, 4, 8), (False, True))))
def test_scores_suffer_less_and_parameters_stay(name, nbits, symmetric):
    torch.manual_seed(0)
    rows, moments = torch.randn(2, H, 3, D, L), random_moments()
    spec = QuantSpec(nbits=nbits, symmetric=symmetric, method=name)
    quantizer = QUANTIZERS[name](spec)
    plain, fed = quantizer.quantize(rows), quantizer.quantize(rows, feedback=moments.feedback(0, spec))
    assert torch.equal(plain.scale, fed.scale)
    assert int(fed.codes.max()) < 2**nbits
    errors = [quantizer.dequantize(groups) - rows for groups in (plain, fed)]
    # Four of 32 directions hold nearly all of the moment: the others can take the error.
    assert weighted_error(errors[1], moments[0]) < 0.35 * weighted_error(errors[0], moments[0])
    assert errors[1].square().mean() < 4 * errors[0].square().mean()


@pytest.mark.parametrize("name", KEY_METHODS)
def test_no_feedback_is_plain_rounding(name):
    torch.manual_seed(0)
    rows = torch.randn(1, H, 2, D, L)
    quantizer = QUANTIZERS[name](QuantSpec(nbits=3))
    plain, fed = quantizer.quantize(rows), quantizer.quantize(rows, feedback=torch.zeros(H, D, D))
    assert torch.equal(plain.codes, fed.codes)


def test_every_channel_is_rounded_to_its_corrected_target():
    """The rule itself, number by number."""
    torch.manual_seed(0)
    rows, moments, spec = torch.randn(1, H, 1, D, L), random_moments(), QuantSpec(nbits=2)
    feedback = moments.feedback(1, spec).double()
    quantizer = QUANTIZERS["affine"](spec)
    groups = quantizer.quantize(rows, feedback=feedback.float())
    error = (quantizer.dequantize(groups) - rows).double()[0, :, 0]
    scale, zero = groups.scale.double()[0, :, 0], groups.zero_point.double()[0, :, 0]
    for head, channel in itertools.product(range(H), range(D)):
        owed = feedback[head, channel + 1 :, channel] @ error[head, channel + 1 :]
        target = rows[0, head, 0, channel].double() - owed
        code = ((target - zero[head, channel]) / scale[head, channel]).clamp(0, 3)
        assert ((code - groups.codes[0, head, 0, channel]).abs() <= 0.5 + 1e-5).all()


def test_feedback_factors_the_moment():
    moments, spec = random_moments(), QuantSpec()
    lower = moments.feedback(0, spec).double() + torch.eye(D)
    assert torch.equal(lower, lower.tril())
    inverse = torch.linalg.inv(lower)
    moment = moments[0].double()
    diagonal = moment.diagonal(dim1=-2, dim2=-1)
    moment = moment + torch.diag_embed(0.1 * diagonal + 0.01 * diagonal.mean(-1, keepdim=True))
    left = inverse @ moment @ inverse.transpose(-1, -2)
    off = left - torch.diag_embed(left.diagonal(dim1=-2, dim2=-1))
    assert off.abs().max() < 1e-4 * left.abs().max()


def test_the_hadamard_basis_has_its_own_feedback():
    moments, plain = random_moments(), QuantSpec(rope="post")
    turned = hadamard(hadamard(moments[0]).transpose(-1, -2))
    want = QueryMoments({0: turned}, 1).feedback(0, plain)
    got = moments.feedback(0, QuantSpec(rope="post", rotation="hadamard"))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(got, moments.feedback(0, plain), atol=0.1)


@pytest.mark.parametrize(
    "moment", [torch.zeros(H, D, D), torch.full((H, D, D), 1e-30), 1e30 * torch.eye(D).expand(H, D, D)]
)
def test_degenerate_moments_round_as_well_as_none(moment):
    spec = QuantSpec(nbits=3)
    feedback = QueryMoments({0: moment}, 1).feedback(0, spec)
    assert torch.isfinite(feedback).all()
    rows = torch.randn(1, H, 1, D, L, generator=torch.Generator().manual_seed(0))
    quantizer = QUANTIZERS["affine"](spec)
    plain = (quantizer.dequantize(quantizer.quantize(rows)) - rows).square().mean()
    assert (quantizer.dequantize(quantizer.quantize(rows, feedback=feedback)) - rows).square().mean() < 1.5 * plain


@pytest.mark.parametrize("value", [0.0, 2.5, 1e5, 3e38])
def test_constant_channels_stay_exact(value):
    moments, spec = random_moments(), QuantSpec(nbits=2)
    rows = torch.full((1, H, 1, D, L), value)
    quantizer = QUANTIZERS["affine"](spec)
    groups = quantizer.quantize(rows, feedback=moments.feedback(0, spec))
    torch.testing.assert_close(quantizer.dequantize(groups), rows)


# ---- the compiled code -------------------------------------------------------------------------------------------


SPECS = [
    QuantSpec(nbits, group_size=group_size, symmetric=symmetric, rope="post", rotation=rotation)
    for nbits, group_size, symmetric, rotation in itertools.product(
        (2, 3, 4, 8), (16, 32, 64, 128), (False, True), ("none", "hadamard")
    )
]


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_compiled_codes_are_those_of_the_quantizer(spec):
    for head_dim, dtype in ((16, torch.float32), (96, torch.bfloat16), (128, torch.float16)):
        feedback = random_moments(head_dim, layers=1).feedback(0, spec)
        length = max(spec.group_size, 32)
        states = (3 * torch.randn(2, H, 2 * length, head_dim, generator=torch.Generator().manual_seed(1))).to(dtype)
        store = BlockStore(spec, length, head_dim, dtype, feedback=feedback)
        want = store.encode(states.reshape(2, H, 2, length, head_dim).float())
        got = cpu.encode(spec, states, length, feedback=feedback)
        for name in ("codes", "scale", "zero_point"):
            assert getattr(got, name) is None or torch.equal(getattr(got, name), getattr(want, name)), name
        assert not torch.equal(got.codes, cpu.encode(spec, states, length).codes)


def test_compiled_codes_with_rope_and_other_ranges():
    rotation = KeyRotation(1 / 1e4 ** (torch.arange(D // 2) / (D // 2)), D)
    spec = QuantSpec(2)
    feedback = random_moments(layers=1).feedback(0, spec)
    states = torch.randn(2, H, 3 * L, D, generator=torch.Generator().manual_seed(1))
    cos, sin = rotation.block_tables(4 + 5 * L, 3, L, states.device)
    blocks = rotation.apply(states.reshape(2, H, 3, L, D), cos, sin, inverse=True)
    want = BlockStore(spec, L, D, torch.float32, feedback=feedback).encode(blocks)
    got = cpu.encode(spec, states, L, rotation, num_sinks=4, first_block=5, feedback=feedback)
    assert torch.equal(got.codes, want.codes)
    fitted = 0.5 * blocks
    want = BlockStore(spec, L, D, torch.float32, feedback=feedback).encode(blocks, fitted)
    got = cpu.encode(spec, blocks.flatten(2, 3), L, fitted=fitted.contiguous(), feedback=feedback)
    assert torch.equal(got.codes, want.codes)


# ---- the moments of a model --------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3", "qwen3", "gpt2"])
def test_moments_are_those_of_queries_at_a_distance(family):
    """A pre-RoPE key of unit length in some direction meets, on average, the square of its scores."""
    model = tiny_model(family)
    texts = ids(2, 40)
    moments = QueryMoments.collect(model, texts)
    assert moments.num_tokens == 2 * 36
    cache = QuantCache(model)
    for layer_idx in moments.layers:
        moment = moments[layer_idx]
        torch.testing.assert_close(moment, moment.transpose(-1, -2))
        assert (torch.linalg.eigvalsh(moment.double()) > -1e-5 * moment.abs().max()).all()
    wanted = [i for i, layer in enumerate(cache.layers) if type(layer).__name__ == "QuantLayer"]
    assert list(moments.layers) == wanted


def test_moments_of_a_llama_layer_by_hand():
    model = tiny_model("llama", num_hidden_layers=1)
    texts = ids(1, 50)
    moment = QueryMoments.collect(model, texts)[0]
    attention = model.model.layers[0].self_attn
    with torch.no_grad():
        hidden = model.model.layers[0].input_layernorm(model.model.embed_tokens(texts))
        query = attention.q_proj(hidden).reshape(50, -1, attention.head_dim)[4:]
    heads = model.config.num_key_value_heads
    query = query.reshape(46, heads, -1, attention.head_dim)
    rotation = QuantCache(model).layers[0].rotation
    total = torch.zeros_like(moment)
    distances = [round(8 * 2 ** (step / 4)) for step in range(33)]
    for distance in distances:
        cos, sin = rotation.tables(torch.tensor([distance]))
        turned = rotation.apply(query, cos, sin)
        total += torch.einsum("thgi,thgj->hij", turned, turned) / (46 * query.shape[2])
    torch.testing.assert_close(moment, total / len(distances), rtol=1e-4, atol=1e-4 * float(moment.abs().max()))


@pytest.mark.parametrize(
    "bad", [torch.ones(2, 3, 4, dtype=torch.long), torch.ones(1, 30), torch.ones(1, 3, dtype=torch.long)]
)
def test_bad_texts_are_named(bad):
    with pytest.raises(ValueError, match="`input_ids` must be integers"):
        QueryMoments.collect(tiny_model("llama"), bad)


def test_files_come_back_and_others_are_named(tmp_path):
    moments = random_moments()
    moments.save(tmp_path / "deep" / "m.safetensors")
    again = QueryMoments.load(tmp_path / "deep" / "m.safetensors")
    assert again.fingerprint == moments.fingerprint and again.layers == (0, 1) and again.num_tokens == 1000
    assert torch.equal(again[1], moments[1])
    with pytest.raises(FileNotFoundError, match="collect"):
        QueryMoments.load(tmp_path / "none.safetensors")
    (tmp_path / "text").write_text("no")
    with pytest.raises(ValueError, match="damaged"):
        QueryMoments.load(tmp_path / "text")
    from safetensors.torch import save_file

    save_file({"layers.0": moments[0]}, tmp_path / "foreign.safetensors")
    with pytest.raises(ValueError, match="does not hold query moments"):
        QueryMoments.load(tmp_path / "foreign.safetensors")


def test_a_file_is_read_again_when_it_changed(tmp_path):
    path = tmp_path / "m.safetensors"
    random_moments().save(path)
    first = load_once(str(path))
    assert load_once(str(path)) is first
    random_moments(rank=3, layers=3).save(path)
    assert load_once(str(path)).layers == (0, 1, 2)


@pytest.mark.parametrize(
    "moments", [{}, {0: torch.zeros(4, 4)}, {0: torch.zeros(1, 3, 4)}, {0: torch.full((1, 2, 2), float("nan"))}]
)
def test_bad_moments_are_named(moments):
    with pytest.raises(ValueError, match="`moments"):
        QueryMoments(moments, 1)


# ---- the cache ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama")


@pytest.fixture(scope="module")
def moments(model):
    return QueryMoments.collect(model, ids(4, 100, seed=7))


@torch.no_grad()
def fed(model, cache, texts, cuts):
    for piece in texts.split(cuts, dim=1):
        logits = model(input_ids=piece, use_cache=True, **{CACHE_KW: cache}).logits
    return logits[:, -1]


def stored(cache):
    return [store.state() for layer in cache.layers for store in layer._block_stores()]


def same(first, second):
    return all(torch.equal(a[name], b[name]) for a, b in zip(first, second, strict=True) for name in a)


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_a_cache_stores_the_same_however_it_is_fed(model, moments, backend):
    whole, pieces, plain = (
        QuantCache(model.config, QUANT, backend=backend, query_moments=m) for m in (moments, moments, None)
    )
    for cache in (whole, pieces, plain):
        for layer_idx in range(len(cache.layers)):
            states = torch.randn(2, 2, 90, model.config.head_dim, generator=torch.Generator().manual_seed(layer_idx))
            for first, last in ((0, 90),) if cache is not pieces else ((0, 37), (37, 38), (38, 90)):
                cache.update(states[:, :, first:last], states[:, :, first:last], layer_idx)
    assert same(stored(whole), stored(pieces))
    assert not same(stored(whole), stored(plain))
    assert whole.memory_report() == plain.memory_report()


def test_generation_and_contract_operations(model, moments):
    texts = ids(2, 60)
    cache = QuantCache(model.config, QUANT, query_moments=moments)
    out = model.generate(texts, **{CACHE_KW: cache}, max_new_tokens=20, do_sample=False)
    assert out.shape == (2, 80)
    assert cache.quantized_length(0) > 0
    cache.reorder_cache(torch.tensor([1, 0]))
    cache.crop(-40)
    again = QuantCache(model.config, QUANT, query_moments=moments)
    fed(model, again, out[[1, 0]][:, : cache.get_seq_length()], 200)
    fed(model, cache, out[[1, 0]][:, -40:], 7)
    assert cache.get_seq_length() == again.get_seq_length() + 40
    cache.reset()
    assert cache.get_seq_length() == 0
    fed(model, cache, texts, 60)
    assert cache.quantized_length(0) > 0
    assert "QueryMoments(" in repr(cache)


def test_padded_rows_are_rounded_as_alone(model, moments):
    texts = ids(1, 70)
    padded = torch.cat([torch.zeros(1, 13, dtype=torch.long), texts], 1)
    mask = (torch.arange(83) >= 13)[None].long()
    alone = QuantCache(model.config, QUANT, query_moments=moments, backend="torch")
    batch = QuantCache(model.config, QUANT, query_moments=moments, backend="auto")
    twin = QuantCache(model.config, QUANT, query_moments=moments, backend="torch")
    for cache, tokens, attention in ((alone, texts, None), (batch, padded, mask), (twin, padded, mask)):
        model.generate(tokens, attention_mask=attention, **{CACHE_KW: cache}, max_new_tokens=8, do_sample=False)
    assert same(stored(batch), stored(twin))


def test_saved_caches_need_their_moments(model, moments, tmp_path):
    texts = ids(2, 90)
    cache = QuantCache(model.config, QUANT, query_moments=moments)
    fed(model, cache, texts, 50)
    cache.save(tmp_path / "cache")
    back = QuantCache.load(tmp_path / "cache", model.config, query_moments=moments)
    more = ids(2, 40, seed=3)
    torch.testing.assert_close(fed(model, back, more, 9), fed(model, cache, more, 9), rtol=0, atol=0)
    for other in (None, random_moments(model.config.head_dim)):
        with pytest.raises(ValueError, match="`query_moments` must be those"):
            QuantCache.load(tmp_path / "cache", model.config, query_moments=other)
    plain = QuantCache(model.config, QUANT)
    fed(model, plain, texts, 50)
    plain.save(tmp_path / "plain")
    with pytest.raises(ValueError, match="got"):
        QuantCache.load(tmp_path / "plain", model.config, query_moments=moments)


def test_settings_name_the_file(model, moments, tmp_path):
    moments.save(tmp_path / "files" / "m.safetensors")
    named = KVQuantConfig.from_dict(QUANT | {"query_moments": str(tmp_path / "files" / "m.safetensors")})
    assert "query_moments: m.safetensors" in named.to_yaml(tmp_path / "files" / "q.yaml")
    config = KVQuantConfig.from_yaml(tmp_path / "files" / "q.yaml")
    assert config.query_moments == str(tmp_path / "files" / "m.safetensors")
    assert KVQuantConfig.from_dict(config.to_dict()) == config and hash(config) != hash(
        config.replace(query_moments=None)
    )
    for cache in (
        QuantCache(model.config, tmp_path / "files" / "q.yaml"),
        QuantCache(model.config, QUANT, query_moments=tmp_path / "files" / "m.safetensors"),
    ):
        assert cache.query_moments.fingerprint == moments.fingerprint
        fed(model, cache, ids(1, 60), 60)
        cache.save(tmp_path / "saved")
        QuantCache.load(tmp_path / "saved", model.config)
    with pytest.raises(FileNotFoundError, match=r"gone\.safetensors"):
        QuantCache(model.config, QUANT, query_moments="gone.safetensors")


def test_what_does_not_fit_is_named(model, moments):
    with pytest.raises(ValueError, match="`query_moments` must be a QueryMoments"):
        QuantCache(model.config, QUANT, query_moments=3)
    with pytest.raises(ValueError, match="`query_moments` must be the path"):
        KVQuantConfig(query_moments=3)
    with pytest.raises(ValueError, match="per channel"):
        QuantCache(model.config, QUANT | {"key": {"granularity": "per_token"}}, query_moments=moments)
    with pytest.raises(ValueError, match="has the layers"):
        QuantCache(model.config, QUANT, query_moments=random_moments(layers=1))
    cache = QuantCache(model.config, QUANT, query_moments=random_moments(head_dim=64))
    with pytest.raises(ValueError, match="heads of size 64"):
        fed(model, cache, ids(1, 40), 40)
    assert cache.get_seq_length() == 0
    QuantCache(model.config, QUANT | {"key": {"nbits": 16, "granularity": "per_token"}}, query_moments=moments)
