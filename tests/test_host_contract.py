"""A walk over Transformers' whole cache interface on partly quantized caches: each call acts on all stored data.

`STATES` are the moments that break caches: nothing stored, sinks only, a window without codes, codes with an empty
window, codes with a full one, a state after cropping into the codes, and a left-padded batch.
"""

import copy
import io
import json
import pickle
from pathlib import Path

import pytest
import torch
from harness import (
    LOSSLESS,
    Q,
    assert_close,
    assert_lengths,
    assert_reported_bytes,
    assert_same_content,
    dynamic_cache,
    each_lossless,
    forward,
    left_pad,
    probe,
    quant_cache,
    random_ids,
    reachable_bytes,
    reachable_storages,
    settings,
    tensors_of,
)
from tiny_models import tiny_model
from transformers.cache_utils import Cache, CacheLayerMixin

BATCH = 3


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama")


def _fill(length, quant=Q, crop=0, pads=None):
    def make(model):
        cache = quant_cache(model, quant)
        ids, mask = random_ids(BATCH, length), None
        if pads:
            ids, mask = left_pad(ids, pads)
            cache.set_padding(mask)
        forward(model, ids, cache, mask)
        if crop:
            cache.crop(-crop)
        return cache

    return make


TURBO = {
    "method": "turboquant",
    "granularity": "per_token",
    "rope": "post",
    "rotation": "hadamard",
    "symmetric": True,
    "levels": "gaussian",
}

PROD = {"method": "turboquant_prod"}
NVFP4 = {"levels": "e2m1", "symmetric": True, "metadata_nbits": 8}
EIGHT = [-1.0, -0.62, -0.3, -0.1, 0.05, 0.25, 0.6, 0.95]

STATES = {
    "sinks-only": _fill(3),
    "window-only": _fill(30),
    "codes-and-window": _fill(100),
    "codes-and-empty-window": _fill(4 + 64, settings(residual=0)),
    "codes-no-sinks": _fill(100, settings(sinks=0)),
    "cropped-into-codes": _fill(100, crop=41),
    "cropped-into-sinks": _fill(100, crop=98),
    "left-padded": _fill(100, pads=(25, 7, 0)),
    "K3V2-mse": _fill(100, settings(3, 2, key={"clip": "mse"}, value={"clip": "mse"})),
    "K16V4": _fill(100, settings(16, 4)),
    "K4V16": _fill(100, settings(4, 16)),
    "hadamard": _fill(100, settings(key={"rotation": "hadamard"}, value={"rotation": "hadamard"})),
    "grouped-heads": _fill(
        100, settings(key={"rotation": "grouped_heads"}, value={"rotation": "hadamard_signs"}), pads=(25, 7, 0)
    ),
    "variance-normalized": _fill(
        100,
        settings(
            2,
            3,
            key={"method": "variance_normalized"},
            value={"method": "variance_normalized", "rotation": "hadamard"},
        ),
    ),
    "outliers": _fill(100, settings(3, 2, key={"outliers": 0.02}, value={"outliers": 0.01, "rotation": "hadamard"})),
    "innerq": _fill(
        100,
        settings(
            3,
            2,
            residual=0,
            key={"granularity": "per_token", "method": "innerq", "symmetric": True},
            value={"granularity": "per_channel", "method": "innerq"},
        ),
    ),
    "metadata-of-8-bits": _fill(
        100,
        settings(
            2,
            3,
            key={"metadata_nbits": 8, "promoted": 0.25},
            value={"metadata_nbits": 8, "rotation": "hadamard", "symmetric": True, "clip": "mse"},
        ),
    ),
    "uneven-levels": _fill(
        100,
        settings(3, 4, key={"levels": "gaussian", "clip": "mse"}, value={"levels": "e2m1", "symmetric": True}),
    ),
    "listed-levels": _fill(
        100,
        settings(3, 2, key={"levels": EIGHT, "outliers": 0.02}, value={"levels": [-0.8, -0.2, 0.3, 1], "clip": "mse"}),
    ),
    "turboquant": _fill(100, settings(3, 2, key=TURBO, value=TURBO)),
    "turboquant-prod": _fill(100, settings(3, 2, key=TURBO | PROD, value=TURBO | PROD)),
    "nvfp4": _fill(100, settings(4, 4, key=NVFP4, value=NVFP4 | {"granularity": "per_token"})),
    "shared-groups": _fill(
        100,
        settings(
            2,
            3,
            key={"shared_groups": 4},
            value={"granularity": "per_channel", "shared_groups": 2, "shared_parameter": "zero_point", "clip": "mse"},
        ),
    ),
    "lossless": _fill(100, LOSSLESS["16-bit"]),
}


@pytest.fixture(params=list(STATES), ids=list(STATES))
def cache(request, model):
    return STATES[request.param](model)


def snapshot(cache):
    """What attention would read, copied."""
    return [tuple(part.clone() for part in cache.dequantize(index)) for index in range(len(cache.layers))]


def assert_snapshot(cache, expected, rows=None, atol=0.0):
    for index, layer in enumerate(expected):
        for name, now, then in zip(("keys", "values"), cache.dequantize(index), layer, strict=True):
            assert_close(now, then if rows is None else then[rows], atol, f"layer {index} {name}")


def next_logits(model, cache, tokens=20, seed=5):
    """Logits of the next tokens on a cache: long enough to flush blocks."""
    batch_size = cache.dequantize(0)[0].shape[0]
    ids = random_ids(1, tokens, seed).expand(batch_size, tokens)
    return torch.cat([forward(model, token, cache) for token in ids.split(1, dim=1)], dim=1)


# ---------------------------------------------------------------- rows


@pytest.mark.parametrize(
    "rows", [[0, 1, 2], [2, 0, 0], [1, 1, 1], [2, 1, 0]], ids=["same", "mixed", "one-parent", "reversed"]
)
def test_reorder_cache(cache, model, rows):
    before = snapshot(cache)
    length = cache.get_seq_length()
    assert cache.reorder_cache(torch.tensor(rows)) is None
    assert_lengths(cache, length)
    assert_snapshot(cache, before, rows)
    assert_reported_bytes(cache)
    together = next_logits(model, cache)
    for row, parent in enumerate(rows):
        assert_close(together[row], together[rows.index(parent)], 1e-5, "rows of one parent")


@pytest.mark.parametrize("rows", [[0], [2], [0, 2], [2, 0], [1, 1, 0, 2, 1]], ids=str)
def test_batch_select_indices(cache, model, rows):
    before = snapshot(cache)
    length = cache.get_seq_length()
    cache.batch_select_indices(torch.tensor(rows))
    assert_lengths(cache, length)
    assert_snapshot(cache, before, rows)
    assert_reported_bytes(cache)
    assert torch.isfinite(next_logits(model, cache)).all()
    assert_lengths(cache, length + 20)


def test_batch_select_indices_releases_the_dropped_rows(model):
    cache = _fill(400)(model)
    before = reachable_bytes(cache)
    cache.batch_select_indices(torch.tensor([1]))
    assert reachable_bytes(cache) <= 0.4 * before


@pytest.mark.parametrize("repeats", [1, 2, 3])
def test_batch_repeat_interleave(cache, model, repeats):
    before = snapshot(cache)
    length = cache.get_seq_length()
    cache.batch_repeat_interleave(repeats)
    rows = [row for row in range(BATCH) for _ in range(repeats)]
    assert_lengths(cache, length)
    assert_snapshot(cache, before, rows)
    assert_reported_bytes(cache)
    assert torch.isfinite(next_logits(model, cache)).all()


def test_row_operations_keep_each_rows_padding(model):
    """After rows moved, their sinks are still the right slots: tokens appended later do not shift them."""
    moved, direct = quant_cache(model), quant_cache(model)
    ids, mask = left_pad(random_ids(BATCH, 30), (25, 7, 0))
    more = random_ids(BATCH, 70, seed=1)
    rows = torch.tensor([2, 0, 1])
    for cache, chosen in ((moved, torch.arange(BATCH)), (direct, rows)):
        cache.set_padding(mask[chosen])
        forward(model, ids[chosen], cache, mask[chosen])
    moved.reorder_cache(rows)
    full = torch.cat([mask[rows], torch.ones_like(more)], dim=1)
    for cache in (moved, direct):
        forward(model, more[rows], cache, full)
    assert moved.quantized_length(0) == 80
    assert_same_content(moved, direct, 1e-4)


# ---------------------------------------------------------------- length


@pytest.mark.parametrize("remove", [1, 16, 17, 40, 99])
def test_crop(cache, model, remove):
    before = snapshot(cache)
    length = cache.get_seq_length()
    assert cache.crop(-remove) is None
    kept = max(0, length - remove)
    assert_lengths(cache, kept)
    assert_reported_bytes(cache)
    if kept:
        for index, layer in enumerate(before):
            for now, then in zip(cache.dequantize(index), layer, strict=True):
                assert_close(now, then[:, :, :kept], 0.0, f"layer {index}")
    ids = random_ids(BATCH, 20, seed=5)
    for token in ids.split(1, dim=1):
        assert torch.isfinite(forward(model, token, cache)).all()
    assert_lengths(cache, kept + 20)


def test_cropped_capacity_is_reported_and_used_again(model):
    cache = _fill(400)(model)
    full = cache.memory_report()
    cache.crop(-300)
    assert_reported_bytes(cache)
    report = cache.memory_report()
    assert report.tokens == 100
    assert report.codes <= 0.3 * full.codes and report.scales <= 0.3 * full.scales
    assert report.total_bytes <= full.total_bytes
    forward(model, random_ids(BATCH, 300, seed=1), cache)
    assert cache.memory_report().total_bytes <= 1.01 * full.total_bytes
    assert_reported_bytes(cache)


def test_reset(cache, model):
    before = reachable_bytes(cache)
    cache.reset()
    assert_lengths(cache, 0)
    assert reachable_bytes(cache) <= max(256, 0.02 * before)
    forward(model, random_ids(2, 50), cache)
    assert_lengths(cache, 50)


def test_lengths_and_mask_sizes(cache):
    length = cache.get_seq_length()
    assert_lengths(cache, length)
    assert cache.get_query_offset() == length
    assert cache.get_max_length() == cache.get_max_length(1) == -1
    assert cache.is_croppable is True
    assert cache.is_sliding == [False, False]
    assert cache.is_initialized is True
    assert cache.is_compileable is False
    for layer in cache.layers:
        assert layer.get_seq_length() == length
        assert layer.get_mask_sizes(3) == (length + 3, 0)
        assert layer.get_max_length() == -1


def test_every_method_of_the_layer_contract_is_there(cache):
    """Names of `CacheLayerMixin` and of `Cache`, whatever this version adds to them, exist and are callable."""
    for layer in cache.layers:
        for name, member in vars(CacheLayerMixin).items():
            if callable(member) and not name.startswith("_"):
                assert callable(getattr(layer, name)), name
        for name in ("crop", "batch_repeat_interleave", "batch_select_indices"):
            assert callable(getattr(layer, name)), name
    for name, member in vars(Cache).items():
        if callable(member) and not name.startswith("_"):
            assert callable(getattr(cache, name)), name


def test_activate_past_recording_changes_nothing(cache, model):
    before = snapshot(cache)
    cache.activate_past_recording()
    assert_snapshot(cache, before)
    cache.crop(0)
    assert_snapshot(cache, before)


# ---------------------------------------------------------------- copies


def _pickle(cache):
    return pickle.loads(pickle.dumps(cache))


def _torch_save(cache):
    buffer = io.BytesIO()
    torch.save(cache, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, _pickle, _torch_save], ids=["deepcopy", "pickle", "torch.save"])
def test_copies_are_equal_and_independent(cache, model, duplicate):
    before, size = snapshot(cache), reachable_bytes(cache)
    twin = duplicate(cache)
    assert type(twin) is type(cache)
    assert repr(twin) == repr(cache)
    assert_snapshot(twin, before)
    assert_reported_bytes(twin)
    assert abs(reachable_bytes(twin) - size) <= 0.02 * size
    assert not set(reachable_storages(twin)) & {
        pointer for pointer, nbytes in reachable_storages(cache).items() if nbytes > 256
    }
    mine, other = next_logits(model, cache), next_logits(model, twin)
    assert_close(other, mine, 0.0)
    assert_same_content(twin, cache)
    twin.crop(-10)
    twin.reorder_cache(torch.tensor([2, 1, 0]))
    assert cache.get_seq_length() == twin.get_seq_length() + 10
    assert_snapshot(cache, snapshot(cache))
    twin.reset()
    assert_lengths(cache, len(before) and before[0][0].shape[2] + 20)


def test_an_empty_cache_can_be_copied(model):
    for duplicate in (copy.deepcopy, copy.copy, _pickle, _torch_save):
        twin = duplicate(quant_cache(model))
        forward(model, random_ids(1, 60), twin)
        assert twin.quantized_length(0) == 32


# ---------------------------------------------------------------- devices


def test_offload_and_prefetch(cache, model):
    before = snapshot(cache)
    for index in range(len(cache.layers)):
        cache.offload(index)
    assert all(tensor.device.type == "cpu" for _, tensor in tensors_of(cache))
    for layer in cache.layers:
        layer.prefetch()
    assert_snapshot(cache, before)
    assert_reported_bytes(cache)
    assert torch.isfinite(next_logits(model, cache)).all()


def test_offload_moves_everything(model, monkeypatch):
    """Every buffer of a layer is asked to move to the CPU; counted on `torch.Tensor.to` and `.cpu`."""
    cache = _fill(100)(model)
    buffers = {pointer for pointer, nbytes in reachable_storages(cache.layers[0]).items() if nbytes > 256}
    moved = set()
    original_to, original_cpu = torch.Tensor.to, torch.Tensor.cpu

    def to(tensor, *args, **kwargs):
        if type(tensor) is torch.Tensor:
            moved.add(tensor.untyped_storage().data_ptr())
        return original_to(tensor, *args, **kwargs)

    def cpu(tensor, *args, **kwargs):
        moved.add(tensor.untyped_storage().data_ptr())
        return original_cpu(tensor, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", to)
    monkeypatch.setattr(torch.Tensor, "cpu", cpu)
    cache.layers[0].offload()
    monkeypatch.undo()
    assert buffers and buffers <= moved


# ---------------------------------------------------------------- sizes


def test_report_equals_reachable_bytes(cache):
    assert_reported_bytes(cache)
    report = cache.memory_report()
    length = cache.get_seq_length()
    assert report.tokens == length
    assert report.quantized_tokens == cache.quantized_length(0)
    dense = length * BATCH * 2 * 2 * 2 * 16 * 4
    assert report.dense_bytes == dense
    assert abs(report.bits_per_value - 8 * report.total_bytes / (dense / 4)) < 1e-6
    text = str(report)
    assert len(text.splitlines()) > 3 and str(report.total_bytes) in text.replace(",", "").replace("_", "")


@pytest.mark.parametrize("how", ["one-shot", "steps"])
@pytest.mark.parametrize("length", [1, 5, 35, 36, 37, 100, 700])
def test_report_at_every_length(model, how, length):
    cache = quant_cache(model)
    ids = random_ids(1, length)
    ids = ids % 100 + 3
    for chunk in ids.split(length if how == "one-shot" else 1, dim=1):
        keys = torch.randn(1, 2, chunk.shape[1], 16)
        for layer_idx in range(2):
            cache.update(keys.clone(), keys.clone(), layer_idx)
    assert_reported_bytes(cache)
    assert cache.memory_report().tokens == length


def test_bits_per_value_of_the_quantized_part(model):
    """K4V4 with groups of 16 and two 16-bit numbers per group: 4 + 32 / 16 = 6 bits."""
    report = _fill(400)(model).memory_report()
    assert abs(report.bits_per_value_quantized - 6.0) < 0.01
    report = _fill(400, settings(2, 4, group=16))(model).memory_report()
    assert abs(report.bits_per_value_quantized - 5.0) < 0.01


def test_reading_leaves_nothing_behind(cache, model):
    """Decoding does not keep a dense copy: after a step the cache holds what it reports, dense history excluded."""
    forward(model, random_ids(BATCH, 1, seed=3), cache)
    cache.dequantize(0)
    assert_reported_bytes(cache)


def test_dequantize_is_what_attention_reads(cache, model):
    said = snapshot(cache)
    length = cache.get_seq_length()
    for (keys, values), (said_keys, said_values) in zip(probe(model, cache), said, strict=True):
        assert_close(keys[:, :, :length], said_keys, 1e-6, "keys")
        assert_close(values[:, :, :length], said_values, 1e-6, "values")


# ---------------------------------------------------------------- files


def test_save_and_load(cache, model, tmp_path):
    from kvquant_hf import QuantCache

    path = tmp_path / "prefix"
    cache.save(path)
    loaded = QuantCache.load(path, model.config)
    assert_snapshot(loaded, snapshot(cache))
    assert_reported_bytes(loaded)
    assert repr(loaded) == repr(cache)
    assert_close(next_logits(model, loaded), next_logits(model, cache), 0.0)
    assert_same_content(loaded, cache)


def test_a_hybrid_cache_is_saved_whole(tmp_path):
    """Sliding layers are part of the file; decoding goes on as if nothing had happened."""
    from kvquant_hf import QuantCache

    model = tiny_model("gemma3")
    cache = quant_cache(model)
    forward(model, random_ids(2, 90), cache)
    cache.save(tmp_path / "prefix")
    loaded = QuantCache.load(tmp_path / "prefix", model.config)
    twins = [loaded, copy.deepcopy(cache), _pickle(cache)]
    for token in random_ids(2, 20, seed=1).split(1, dim=1):
        expected = forward(model, token, cache)
        for twin in twins:
            assert_close(forward(model, token, twin), expected, 0.0)
    for twin in twins:
        assert twin.get_seq_length() == 110
        assert_reported_bytes(twin)


def test_row_operations_on_a_hybrid_cache():
    model = tiny_model("gemma3")
    ids, rows = random_ids(3, 90), torch.tensor([2, 0, 0])
    moved, direct = quant_cache(model), quant_cache(model)
    forward(model, ids, moved)
    forward(model, ids[rows], direct)
    moved.reorder_cache(rows)
    for _ in range(2):
        token = random_ids(3, 1, seed=7)
        assert_close(forward(model, token, moved), forward(model, token, direct))
    moved.batch_repeat_interleave(2)
    direct.batch_repeat_interleave(2)
    assert_close(forward(model, random_ids(6, 1), moved), forward(model, random_ids(6, 1), direct))


def _files(path):
    """The files a save left, whether the path is a directory or a stem."""
    found = path.rglob("*") if path.is_dir() else path.parent.glob(f"{path.name}*")
    return [item for item in found if item.is_file()]


def _truncate(file):
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def _flip(file):
    data = bytearray(file.read_bytes())
    data[2] ^= 0xFF
    file.write_bytes(data)


def _foreign(file):
    if file.suffix == ".json":
        file.write_text(json.dumps({"format": "something else", "version": 99}))
    else:
        from safetensors.torch import save_file

        save_file({"weight": torch.zeros(3)}, file)


@pytest.mark.parametrize(
    "damage", [_truncate, _flip, _foreign, Path.unlink], ids=["truncate", "flip", "foreign", "missing"]
)
def test_a_damaged_file_is_refused_clearly(model, tmp_path, damage):
    from kvquant_hf import QuantCache

    cache = _fill(100)(model)
    path = tmp_path / "prefix"
    cache.save(path)
    names = [file.name for file in _files(path)]
    assert names
    for name in names:
        target = tmp_path / f"damaged-{names.index(name)}" / "prefix"
        target.parent.mkdir()
        cache.save(target)
        damage(next(file for file in _files(target) if file.name == name))
        with pytest.raises((ValueError, FileNotFoundError), match=r"prefix|damaged|format|version|cache"):
            QuantCache.load(target, model.config)


def test_a_file_of_another_model_is_refused(model, tmp_path):
    from kvquant_hf import QuantCache

    path = tmp_path / "prefix"
    _fill(100)(model).save(path)
    for other in (
        tiny_model("llama", num_hidden_layers=3).config,
        tiny_model("llama", num_key_value_heads=4).config,
        tiny_model("llama", head_dim=32).config,
    ):
        with pytest.raises(ValueError, match=r"layer|head|shape"):
            QuantCache.load(path, other)


def test_save_does_not_change_the_cache_and_overwrites(model, tmp_path):
    from kvquant_hf import QuantCache

    cache = _fill(100)(model)
    before = snapshot(cache)
    path = tmp_path / "prefix"
    cache.save(path)
    assert_snapshot(cache, before)
    cache.crop(-50)
    cache.save(path)
    assert QuantCache.load(path, model.config).get_seq_length() == 50


@each_lossless
def test_lossless_cache_matches_dynamic_cache_after_every_operation(model, lossless):
    """One long life: prefill, steps, reorder, crop, repeat, select, copy; compared with `DynamicCache` throughout."""
    caches = [quant_cache(model, lossless), dynamic_cache(model)]

    def both(operation):
        for cache in caches:
            operation(cache)
        ours, theirs = caches
        assert ours.get_seq_length() == theirs.get_seq_length()
        for index in range(2):
            assert_close(ours.dequantize(index)[0], theirs.layers[index].keys, 1e-4, "keys")
            assert_close(ours.dequantize(index)[1], theirs.layers[index].values, 1e-4, "values")

    both(lambda c: forward(model, random_ids(3, 70), c))
    for seed in range(20):
        both(lambda c, seed=seed: forward(model, random_ids(3, 1, seed), c))
    both(lambda c: c.reorder_cache(torch.tensor([1, 2, 1])))
    both(lambda c: forward(model, random_ids(3, 1, seed=30), c))
    both(lambda c: c.crop(-37))
    both(lambda c: forward(model, random_ids(3, 5, seed=31), c))
    both(lambda c: c.batch_repeat_interleave(2))
    both(lambda c: forward(model, random_ids(6, 3, seed=32), c))
    both(lambda c: c.batch_select_indices(torch.tensor([5, 0])))
    both(lambda c: forward(model, random_ids(2, 40, seed=33), c))
    caches[0] = copy.deepcopy(caches[0])
    both(lambda c: forward(model, random_ids(2, 1, seed=34), c))
