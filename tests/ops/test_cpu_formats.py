"""What comparison presets store, read by the compiled CPU backend: tables, outliers, InnerQ, other granularities.

Every kind of code, head size, embedding and number of rows is a kernel to be compiled, which takes a second or two. So
what is independent in the kernel is combined pairwise here, and most tests have three query rows to a head.
"""

import warnings

import pytest
import torch
from tiny_models import tiny_model

from kvquant_hf import KVQuantConfig, QuantCache
from kvquant_hf._compat import cache_kwargs
from kvquant_hf.ops import cpu, decode_attention, notice, reference
from kvquant_hf.ops.cpu import tables
from kvquant_hf.quantizers import codebook
from kvquant_hf.quantizers.levels import Levels
from kvquant_hf.rope import KeyRotation
from kvquant_hf.spec import LEVELS_NBITS
from tests.ops.test_decode_attention import check, filled_layer, mask_of, poison_fresh_memory  # noqa: F401

TABLES = [(name, nbits) for name, widths in LEVELS_NBITS.items() for nbits in widths]
# Listed tables of keys and of values: uneven steps, one-sided, beyond the range of a group, nearly equal numbers.
LISTED = {
    2: ((-0.9, -0.2, 0.35, 0.8), (-2.0, 0.1, 0.100001, 0.2)),
    3: ((-1.0, -0.62, -0.3, -0.1, 0.05, 0.25, 0.6, 1.0), (0.1, 0.2, 0.3, 0.4, 0.5, 1.0, 1.5, 2.0)),
    4: (tuple(i / 10 - 0.6 if i < 8 else i / 8 - 0.8 for i in range(16)), tuple((i / 8 - 1) ** 3 for i in range(16))),
}
TURBO = {"granularity": "per_token", "group_size": 128, "rope": "post", "rotation": "hadamard"}
TURBO |= {"method": "turboquant", "symmetric": True, "levels": "gaussian"}
# Scales of e4m3 (NVFP4).
FP4 = {"levels": "e2m1", "symmetric": True, "metadata_nbits": 8}
USUAL = {"key": {"granularity": "per_channel"}, "value": {"granularity": "per_token"}}
ACROSS = {"key": {"granularity": "per_token"}, "value": {"granularity": "per_channel"}}


def rotary(head_dim: int, kind: str = "half") -> KeyRotation | None:
    if kind == "none":
        return None
    width = 8 if kind == "partial" else head_dim
    frequencies = 1 / 100 ** (torch.arange(width // 2) / (width // 2))
    return KeyRotation(frequencies, head_dim, head_dim - width, "interleaved" if kind == "interleaved" else "half")


def sides(shape: dict, **both) -> dict:
    return {side: both | shape[side] for side in ("key", "value")}


def check_read(layer, q_heads, q_len, mask=None):
    assert layer.quantized_length
    assert cpu.unsupported(layer.view()) is None
    check(layer, q_heads, q_len, mask)


@pytest.mark.parametrize("shape", [USUAL, ACROSS], ids=["usual", "across"])
@pytest.mark.parametrize(("levels", "nbits"), TABLES)
def test_every_table(levels, nbits, shape):
    settings = sides(shape, levels=levels, nbits=nbits)
    settings["key" if shape is USUAL else "value"]["symmetric"] = True
    layer = filled_layer(309, uneven=True, rotation=rotary(32), **settings)
    check_read(layer, 6, 1)
    check_read(layer, 2, 3, torch.rand(2, 1, 3, 309) > 0.3)


@pytest.mark.parametrize(
    ("head_dim", "group_size", "levels", "ratio"),
    [
        (16, 16, "uniform", 1),
        (16, 64, "gaussian", 7),
        (48, 16, "gaussian", 1),
        (48, 128, "uniform", 7),
        (80, 16, "uniform", 1),
        (80, 64, "gaussian", 7),
        (128, 16, "gaussian", 7),
        (128, 128, "uniform", 1),
        (256, 64, "uniform", 7),
        (256, 128, "gaussian", 1),
    ],
)
def test_head_sizes_that_groups_along_channels_do_not_divide(head_dim, group_size, levels, ratio):
    for symmetric in (False, True):
        both = {"granularity": "per_token", "group_size": group_size, "levels": levels, "symmetric": symmetric}
        both |= {"rope": "post"}
        layer = filled_layer(150, head_dim=head_dim, value_dim=48, key=both, value=both)
        check_read(layer, 2 * ratio, 1)


@pytest.mark.parametrize(
    ("rope", "both"),
    [
        ("none", {}),
        ("half", {}),
        ("interleaved", {}),
        ("partial", {}),
        ("none", {"levels": "e4m3", "nbits": 8}),
        ("interleaved", {"levels": "e2m1", "symmetric": True}),
        ("partial", {"levels": "e4m3", "nbits": 8}),
    ],
    ids=str,
)
def test_keys_per_token_in_any_rotary_embedding(rope, both):
    settings = {"head_dim": 48, "rotation": rotary(48, rope)} | sides(ACROSS, **both)
    check_read(filled_layer(309, uneven=True, **settings), 6, 2, torch.rand(2, 1, 2, 309) > 0.3)
    padded = filled_layer(140, batch_size=3, padding=[37, 2, 0], **settings)
    check_read(padded, 12, 1, mask_of([37, 2, 0], 140))


@pytest.mark.parametrize(
    ("nbits", "head_dim", "dtype"),
    [
        (2, 64, torch.float32),
        (2, 256, torch.bfloat16),
        (3, 64, torch.bfloat16),
        (3, 256, torch.float32),
        (4, 64, torch.float16),
        (4, 256, torch.float32),
    ],
    ids=str,
)
def test_turboquant(nbits, head_dim, dtype):
    both = TURBO | {"nbits": nbits}
    layer = filled_layer(309, dtype=dtype, uneven=True, head_dim=head_dim, key=both, value=both)
    check_read(layer, 8, 1)
    check_read(layer, 4, 2, torch.randn(2, 4, 2, 309))


@pytest.mark.parametrize("tokens", [36, 37, 51, 52, 53, 63, 84, 1023, 1100, 2100])
@pytest.mark.parametrize("residual_length", [0, 16, 31])
def test_lengths_around_sinks_blocks_and_tiles(tokens, residual_length):
    both = TURBO | {"nbits": 2}
    check(filled_layer(tokens, residual_length=residual_length, key=both, value=both), 4, 1, None)


@pytest.mark.parametrize("tokens", [309, 700])
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ({"levels": "gaussian", "group_size": 64}, {"granularity": "per_channel"}),
        ({"nbits": 16}, {"levels": "laplace", "granularity": "per_channel", "group_size": 16}),
        ({"granularity": "per_token", "group_size": 16}, {"nbits": 16}),
        ({"nbits": 2, "promoted": 0.25}, {"levels": "gaussian", "rotation": "hadamard", "symmetric": True}),
        ({"levels": "laplace", "group_size": 128}, {"method": "variance_normalized"}),
        ({"method": "variance_normalized"}, {"levels": "e4m3", "nbits": 8, "group_size": 128}),
        ({"granularity": "per_token"}, {"symmetric": True, "metadata_nbits": 8}),
    ],
)
def test_sides_of_different_kinds(key, value, tokens):
    layer = filled_layer(tokens, head_dim=64, uneven=True, rotation=rotary(64), key=key, value=value)
    check_read(layer, 6, 1)


# Kernels of `test_every_table` where there is a table.
@pytest.mark.parametrize("shape", [USUAL, ACROSS], ids=["usual", "across"])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("levels", ["gaussian", "e4m3", "uniform"])
def test_parameters_in_float32(levels, symmetric, shape):
    both = {"levels": levels, "symmetric": symmetric, "nbits": 8 if levels == "e4m3" else 4}
    layer = filled_layer(100, rotation=rotary(32), **sides(shape, **both))
    big = 1e5 * torch.randn(2, 2, 64, 32)
    layer.update(big, big)
    assert layer._stores[0].scale.dtype == layer._stores[1].scale.dtype == torch.float32
    view, query = layer.view(1), 1e-5 * torch.randn(2, 6, 1, 32)
    assert cpu.unsupported(view) is None
    # Values of 1e5 may cancel in an output: the error of float32 is relative to those, not to their sum.
    torch.testing.assert_close(
        cpu.decode_attention(query, view, None, 0.2),
        reference.decode_attention(query, view, None, 0.2),
        rtol=1e-4,
        atol=2e-6 * big.abs().max().item(),
    )


@pytest.mark.parametrize("shape", [USUAL, ACROSS], ids=["usual", "across"])
@pytest.mark.parametrize("levels", ["e4m3", "e5m2"])
def test_the_bits_of_a_format_say_what_its_table_says(levels, shape, monkeypatch):
    layer = filled_layer(309, uneven=True, rotation=rotary(32), **sides(shape, levels=levels, nbits=8))
    query = torch.randn(2, 6, 1, 32)
    by_bits = cpu.decode_attention(query, layer.view(), None, 0.2)
    monkeypatch.setattr(tables, "_FORMATS", {})
    layer.view().memo.clear()
    assert torch.equal(cpu.decode_attention(query, layer.view(), None, 0.2), by_bits)
    check_read(layer, 6, 1)


@pytest.mark.parametrize("nbits", [2, 3, 4, 8])
def test_a_table_is_data(nbits, monkeypatch):
    name = "e4m3" if nbits == 8 else "gaussian"
    numbers = torch.randn(2**nbits, generator=torch.Generator().manual_seed(nbits))
    own = Levels.of(numbers, reach=float(numbers.abs().max()))
    for module in (codebook, tables):
        monkeypatch.setattr(module, "levels_of", lambda *args: own)
    monkeypatch.setattr(tables, "_FORMATS", {})
    layer = filled_layer(309, rotation=rotary(32), **sides(USUAL, levels=name, nbits=nbits))
    check_read(layer, 6, 1)
    assert any(part is own.table for part in layer.view().memo["cpu"].levels)


def test_what_is_not_read_across_is_named():
    layer = filled_layer(200, backend="cpu", value=ACROSS["value"] | {"nbits": 2, "promoted": 0.25})
    with pytest.raises(ValueError, match="`backend='cpu'` does not read values per_channel with promoted channels"):
        decode_attention(torch.randn(2, 4, 1, 32), layer.view())


# ---- scales of a byte --------------------------------------------------------------------------------------------


EVEN_BYTES = {"symmetric": True, "metadata_nbits": 8}


@pytest.mark.parametrize("shape", [USUAL, ACROSS], ids=["usual", "across"])
@pytest.mark.parametrize(
    ("both", "head_dim", "group_size", "rope"),
    [
        (FP4, 16, 32, "post"),
        (FP4, 48, 64, "partial"),
        (FP4, 48, 64, "post"),
        (FP4, 64, 16, "post"),
        (FP4, 128, 16, "interleaved"),
        (EVEN_BYTES, 48, 32, "post"),
        (EVEN_BYTES, 48, 32, "interleaved"),
    ],
    ids=["fp4-16", "fp4-48-partial", "fp4-48", "fp4-64", "fp4-128-interleaved", "even-48", "even-48-interleaved"],
)
def test_scales_of_a_byte(both, head_dim, group_size, shape, rope):
    """Groups within rows, as long as rows, and longer: the last one is short."""
    settings = sides(shape, **both, group_size=group_size)
    settings["key"]["rope"] = "post" if rope == "post" else "pre"
    rotation = None if rope == "post" else rotary(head_dim, rope)
    layer = filled_layer(309, uneven=True, head_dim=head_dim, rotation=rotation, **settings)
    assert all(store.scale.dtype == torch.uint8 for store in layer._block_stores())
    check_read(layer, 6, 1)
    check_read(layer, 2, 3, torch.rand(2, 1, 3, 309) > 0.3)
    padded = filled_layer(140, batch_size=3, padding=[37, 2, 0], head_dim=head_dim, rotation=rotation, **settings)
    check_read(padded, 6, 1, mask_of([37, 2, 0], 140))


@pytest.mark.parametrize(
    ("side", "ratio", "dtype"),
    [
        ("both", 1, torch.float32),
        ("both", 3, torch.float32),
        ("both", 7, torch.float32),
        ("both", 16, torch.float32),
        ("both", 3, torch.bfloat16),
        ("both", 16, torch.float16),
        ("key", 7, torch.bfloat16),
        ("key", 16, torch.float32),
        ("value", 1, torch.float16),
        ("value", 16, torch.float32),
    ],
    ids=str,
)
def test_scales_of_e4m3_of_any_queries(side, ratio, dtype):
    exact = {"nbits": 16}
    sides_of = {name: FP4 | ACROSS["key"] if side in (name, "both") else exact for name in ("key", "value")}
    sides_of["key"]["rope"] = "post"
    layer = filled_layer(1100, dtype=dtype, uneven=True, head_dim=64, **sides_of)
    check_read(layer, 2 * ratio, 1)
    check_read(layer, 2 * ratio, 2, torch.randn(2, 1, 2, 1100))


@pytest.mark.parametrize("rope", ["none", "half"])
@pytest.mark.parametrize("shape", [USUAL, ACROSS], ids=["usual", "across"])
def test_every_byte_of_e4m3_with_bases_of_all_sizes(shape, rope):
    layer = filled_layer(309, head_dim=64, rotation=rotary(64, rope), **sides(shape, **FP4, group_size=16))
    stores = layer._block_stores()
    for store in stores:
        amount = store.scale.numel()
        assert amount > 2 * 0x7F
        store.scale = (torch.arange(amount) * 5 % 0x7F).to(torch.uint8).view(store.scale.shape)
        store.scale[0, 0, 1] = 0  # a block of zeros
        store.scale[1, 1, :, ::3] = 0
    check_read(layer, 6, 1)
    query = torch.randn(2, 6, 1, 64)
    for key_size, value_size in ((1e-30, 1e30), (1e4, 1e-30), (3e-41, 3e-41), (1e30, 1e33)):
        for store, size in zip(stores, (key_size, value_size), strict=True):
            store.second_level = torch.full(store.second_level.shape, size)
            store.second_level[:, :, ::2] *= 0.3
            store.second_level[:, 1, 0] = 0
        layer.view(1).memo.clear()
        assert cpu.unsupported(layer.view(1)) is None
        scaled = query / max(key_size, 1)
        got = cpu.decode_attention(scaled, layer.view(1), None, 0.2)
        want = reference.decode_attention(scaled, layer.view(1), None, 0.2)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5 * max(1.0, value_size))
        assert got.isfinite().all()


def test_scales_of_e4m3_of_tokens_of_all_sizes():
    """What the quantizer itself stores of zeros, of the smallest scales and of numbers beyond float16."""
    for shape in (USUAL, ACROSS):
        layer = filled_layer(100, rotation=rotary(32), **sides(shape, **FP4, group_size=16))
        states = torch.randn(2, 2, 128, 32)
        states[..., :16] *= 1e-7
        states[:, :, 40:60] = 0
        states[1] = 0
        states[0, 1] *= 1e6
        layer.update(states, states.clone())
        stores = layer._block_stores()
        assert all(store.second_level.dtype == torch.float32 and (store.scale == 0).any() for store in stores)
        query = 1e-5 * torch.randn(2, 4, 1, 32)
        assert cpu.unsupported(layer.view(1)) is None
        torch.testing.assert_close(
            cpu.decode_attention(query, layer.view(), None, 0.2),
            reference.decode_attention(query, layer.view(), None, 0.2),
            rtol=1e-4,
            atol=2e-6 * states.abs().max().item(),
        )


# ---- outliers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nbits", "shape", "rope"),
    [
        (2, USUAL, "none"),
        (3, USUAL, "half"),
        (4, USUAL, "interleaved"),
        (8, USUAL, "partial"),
        (2, ACROSS, "half"),
        (3, ACROSS, "none"),
        (4, ACROSS, "partial"),
        (8, ACROSS, "interleaved"),
    ],
    ids=[f"{nbits}-{shape}" for shape in ("usual", "across") for nbits in (2, 3, 4, 8)],
)
def test_outliers(nbits, shape, rope):
    settings = sides(shape, nbits=nbits, group_size=16, outliers=0.02)
    settings["value"] |= {"symmetric": nbits == 3, "rotation": "hadamard" if nbits < 4 else "none"}
    settings |= {"head_dim": 48, "rotation": rotary(48, rope), "uneven": True}
    layer = filled_layer(309, **settings)
    store = layer._block_stores()[0]
    assert store.outlier_index.shape[-1] == store.spec.num_outliers(48 * layer.view().block_length) > 8
    check_read(layer, 6, 1)
    check_read(layer, 2, 3, torch.rand(2, 1, 3, 309) > 0.3)
    padded = filled_layer(140, batch_size=3, padding=[37, 2, 0], **settings)
    check_read(padded, 6, 1, mask_of([37, 2, 0], 140))


@pytest.mark.parametrize(
    ("head_dim", "group_size", "dtype"),
    [(16, 32, torch.bfloat16), (80, 64, torch.float32), (128, 128, torch.float16), (256, 64, torch.float32)],
    ids=str,
)
def test_outliers_of_other_sizes(head_dim, group_size, dtype):
    both = {"nbits": 3, "group_size": group_size, "outliers": 0.01}
    layer = filled_layer(300, head_dim=head_dim, dtype=dtype, rotation=rotary(head_dim), key=both, value=both)
    layer.view().value_store.codes[:, :, 0] ^= 0xFF  # as good as any, for outliers
    check_read(layer, 8, 1)
    check_read(layer, 4, 2, torch.randn(2, 4, 2, 300))


@pytest.mark.parametrize("symmetric", [False, True], ids=["zero-points", "symmetric"])
@pytest.mark.parametrize("shape", [USUAL, ACROSS], ids=["usual", "across"])
@pytest.mark.parametrize(("nbits", "outliers"), [(2, 0.02), (3, 0.0), (3, 0.02), (4, 0.0)])
def test_listed_levels(nbits, shape, symmetric, outliers):
    """A table of its own for keys and for values, alone and beside outliers."""
    keys, values = LISTED[nbits]
    settings = sides(shape, nbits=nbits, symmetric=symmetric, group_size=64, outliers=outliers)
    settings["key"]["levels"], settings["value"]["levels"] = list(keys), list(values)
    layer = filled_layer(309, head_dim=48, rotation=rotary(48), uneven=True, **settings)
    check_read(layer, 6, 1)
    tables = [table.tolist() for table in layer.view().memo["cpu"].levels]
    assert tables == [torch.tensor(table).tolist() for table in (keys, values)]
    check_read(layer, 2, 3, torch.rand(2, 1, 3, 309) > 0.3)


@pytest.mark.parametrize(
    ("shape", "rope"),
    [(USUAL, "none"), (ACROSS, "interleaved")],
    ids=["usual", "across"],
)
@pytest.mark.parametrize(("levels", "nbits"), TABLES)
def test_outliers_beside_every_table(levels, nbits, shape, rope):
    settings = sides(shape, levels=levels, nbits=nbits, group_size=16, outliers=0.01)
    settings["key" if rope == "none" else "value"] |= {"symmetric": True}
    settings["value"]["rotation"] = "hadamard" if rope == "none" else "none"
    layer = filled_layer(309, head_dim=64, rotation=rotary(64, rope), uneven=True, **settings)
    assert all(store.outlier_index.shape[-1] > 8 for store in layer._block_stores())
    check_read(layer, 6, 1)
    check_read(layer, 2, 3, torch.rand(2, 1, 3, 309) > 0.3)


@pytest.mark.parametrize("side", ["key", "value"])
def test_outliers_of_one_side_beside_another_format(side):
    other = "value" if side == "key" else "key"
    settings = {side: {"nbits": 2, "outliers": 0.005}, other: {"levels": "gaussian", "symmetric": True}}
    check_read(filled_layer(309, uneven=True, rotation=rotary(32), **settings), 6, 1)


def test_places_of_outliers_may_take_the_highest_bit_and_32_bits():
    both = {"nbits": 2, "group_size": 128, "outliers": 0.01}
    layer = filled_layer(300, batch_size=1, head_dim=256, key=both, value=both | {"granularity": "per_token"})
    stores = layer._block_stores()
    assert all(store.outlier_index.dtype == torch.int16 for store in stores)
    for store in stores:
        store.outlier_index = store.outlier_index.int() & 0xFFFF
        store.outlier_value = store.outlier_value.float()
    layer.view().memo.clear()
    check_read(layer, 4, 1)


def test_outliers_in_float32():
    layer = filled_layer(100, rotation=rotary(32), **sides(USUAL, outliers=0.01))
    big = 1e5 * torch.randn(2, 2, 64, 32)
    layer.update(big, big)
    assert layer._stores[0].outlier_value.dtype == layer._stores[1].outlier_value.dtype == torch.float32
    view, query = layer.view(1), 1e-5 * torch.randn(2, 4, 1, 32)
    torch.testing.assert_close(
        cpu.decode_attention(query, view, None, 0.2),
        reference.decode_attention(query, view, None, 0.2),
        rtol=1e-4,
        atol=2e-6 * big.abs().max().item(),
    )


@pytest.mark.parametrize("shape", [USUAL, ACROSS], ids=["usual", "across"])
@pytest.mark.parametrize("symmetric", [False, True], ids=["hybrid", "symmetric"])
@pytest.mark.parametrize(("nbits", "rope"), [(2, "half"), (3, "none"), (4, "half"), (8, "none")])
def test_innerq(nbits, symmetric, shape, rope):
    settings = sides(shape, method="innerq", nbits=nbits, symmetric=symmetric, group_size=16)
    layer = filled_layer(309, uneven=True, head_dim=48, rotation=rotary(48, rope), **settings)
    keys, values = layer._block_stores()
    assert (keys.factor is None) == (shape is USUAL) == (values.factor is not None)
    if not symmetric:
        assert 0 < keys.scale.signbit().float().mean() < 1
    check_read(layer, 6, 1)
    check_read(layer, 2, 3, torch.rand(2, 1, 3, 309) > 0.3)


@pytest.mark.parametrize("rope", ["none", "interleaved"])
@pytest.mark.parametrize("group_size", [32, 64])
def test_factors_along_rows_of_other_granularities(group_size, rope):
    settings = sides(ACROSS, method="variance_normalized", group_size=group_size)
    layer = filled_layer(309, uneven=True, head_dim=80, rotation=rotary(80, rope), **settings)
    for store in layer._block_stores():
        assert store.factor.amax() > 1.2 * store.factor.amin()  # else nothing would show
    check_read(layer, 6, 1)
    check_read(layer, 2, 3, torch.rand(2, 1, 3, 309) > 0.3)


PRESETS = ["turboquant2", "turboquant3", "turboquant4", "fp8", "kvquant2", "kvquant3", "innerq3", "nvfp4", "rotatekv2"]


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_are_read_without_the_torch_backend(preset, monkeypatch):
    """Greedy tokens of a tiny model are those of the torch backend, and `auto` does not need it."""
    model = tiny_model("llama")
    ids = torch.randint(3, 128, (2, 150), generator=torch.Generator().manual_seed(0))
    config = KVQuantConfig.from_preset(preset).replace(residual_length=16)
    tokens = {}
    for backend in ("torch", "cpu", "auto"):
        if backend == "auto":
            monkeypatch.setattr(reference, "decode_attention", lambda *args: pytest.fail("the reference was used"))
            monkeypatch.setattr(notice, "_told", set())
        cache = QuantCache(model.config, config, backend=backend)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            tokens[backend] = model.generate(
                ids, **cache_kwargs(cache), max_new_tokens=40, do_sample=False, pad_token_id=0
            )
        assert cache.quantized_length(0) >= 64
    assert torch.equal(tokens["cpu"], tokens["torch"])
    assert torch.equal(tokens["auto"], tokens["torch"])
