"""A quantized cache on disk: `cache.safetensors` beside `cache.json`, which describes and identifies it."""

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import PreTrainedConfig, PreTrainedModel

from kvquant_hf.config import KVQuantConfig
from kvquant_hf.layer import QuantLayer
from kvquant_hf.layer_state import layer_state, load_layer_state

if TYPE_CHECKING:
    from kvquant_hf.cache import QuantCache
    from kvquant_hf.query_moments import QueryMoments

FORMAT = "kvquant_hf.cache"
FORMAT_VERSION = 1
_TENSORS, _DESCRIPTION = "cache.safetensors", "cache.json"
# State of the layers of Transformers' own that can be written: plain and sliding keys and values.
_SLIDING_FIELDS = ("keys", "values")


def save_cache(cache: "QuantCache", path: Path) -> None:
    """Write a cache to the directory `path`, made if missing.

    Raises:
        ValueError: A layer holds state that the format does not know.
    """
    tensors: dict[str, torch.Tensor] = {}
    layers: list[dict[str, Any]] = []
    for i, layer in enumerate(cache.layers):
        if isinstance(layer, QuantLayer):
            state, facts = layer_state(layer)
        else:
            state, facts = _foreign_state(i, cache.layer_types[i], layer)
        tensors |= {f"layers.{i}.{name}": tensor for name, tensor in state.items()}
        layers.append(facts)
    path.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path) as scratch:
        data = Path(scratch) / _TENSORS
        save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, data)
        description = {
            "format": FORMAT,
            "version": FORMAT_VERSION,
            "sha256": _sha256(data),
            "quant_config": cache.quant_config.to_dict(),
            "query_moments": None if cache.query_moments is None else cache.query_moments.fingerprint,
            "model": cache.model_facts,
            "layer_types": list(cache.layer_types),
            "layers": layers,
        }
        note = Path(scratch) / _DESCRIPTION
        note.write_text(json.dumps(_with_string_keys(description), indent=1), encoding="utf-8")
        # The description goes last: without it, or with an older one, the tensors are not taken for a cache.
        os.replace(data, path / _TENSORS)
        os.replace(note, path / _DESCRIPTION)


def load_cache(
    cls: "type[QuantCache]",
    path: Path,
    config: PreTrainedConfig | PreTrainedModel,
    device: torch.device,
    query_moments: "QueryMoments | str | Path | None",
) -> "QuantCache":
    """Read a cache from a directory, see `QuantCache.load`."""
    description = _read_description(path)
    data = path / _TENSORS
    if not data.is_file():
        raise FileNotFoundError(f"{path} has a {_DESCRIPTION} but no {_TENSORS}.")
    if _sha256(data) != description["sha256"]:
        raise ValueError(f"{data} is damaged or belongs to another {_DESCRIPTION}: its checksum differs.")
    try:
        tensors = load_file(data, device=str(device))
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{data} is damaged: {error}") from error
    quant = KVQuantConfig.from_dict(_with_layer_keys(description["quant_config"]))
    cache = cls(config, quant, query_moments=query_moments)
    made_with = description.get("query_moments")
    given = None if cache.query_moments is None else cache.query_moments.fingerprint
    if made_with != given:
        raise ValueError(
            f"`query_moments` must be those that the cache in {path} was made with, {made_with}, got {given}."
        )
    if list(cache.layer_types) != description["layer_types"]:
        raise ValueError(
            f"{path} holds a cache of a model with the layer types {description['layer_types']}, `config` has "
            f"{list(cache.layer_types)}."
        )
    if cache.model_facts != description["model"]:
        raise ValueError(
            f"{path} holds a cache of a model with {description['model']}, `config` has {cache.model_facts}: heads, "
            "layers or shapes differ."
        )
    for i, (layer, facts) in enumerate(zip(cache.layers, description["layers"], strict=True)):
        prefix = f"layers.{i}."
        state = {name[len(prefix) :]: t for name, t in tensors.items() if name.startswith(prefix)}
        try:
            if isinstance(layer, QuantLayer):
                load_layer_state(layer, state, facts)
            else:
                _load_foreign_state(layer, state, facts)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} does not fit this model at layer {i}: {error}") from error
    return cache


def _read_description(path: Path) -> dict[str, Any]:
    note = path / _DESCRIPTION
    if not note.is_file():
        raise FileNotFoundError(f"{path} holds no saved cache ({_DESCRIPTION} is missing).")
    try:
        description = json.loads(note.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{note} is damaged: {error}") from error
    if not isinstance(description, dict) or description.get("format") != FORMAT:
        raise ValueError(f"{note} does not describe a saved cache of kvquant_hf.")
    if description.get("version") != FORMAT_VERSION:
        raise ValueError(
            f"{note} has the format version {description.get('version')!r}, this release reads {FORMAT_VERSION}."
        )
    missing = {"sha256", "quant_config", "model", "layer_types", "layers"} - set(description)
    if missing:
        raise ValueError(f"{note} is damaged: it lacks {sorted(missing)}.")
    if len(description["layers"]) != len(description["layer_types"]):
        raise ValueError(
            f"{note} is damaged: it describes {len(description['layers'])} layers of "
            f"{len(description['layer_types'])}."
        )
    return description


def _foreign_state(index: int, layer_type: str, layer: Any) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    known = {"keys", "values", "cumulative_length"}
    extra = {
        name for name in ("conv_states", "recurrent_states", "indexer_keys") if getattr(layer, name, None) is not None
    }
    if extra:
        raise ValueError(f"layer {index} ({layer_type}) holds {sorted(extra)}; only {sorted(known)} can be saved.")
    tensors = {name: getattr(layer, name, None) for name in _SLIDING_FIELDS}
    state = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, torch.Tensor)}
    return state, {"cumulative_length": getattr(layer, "cumulative_length", None)}


def _load_foreign_state(layer: Any, state: dict[str, torch.Tensor], facts: dict[str, Any]) -> None:
    if not state:
        return
    layer.lazy_initialization(state["keys"], state["values"])
    for name in _SLIDING_FIELDS:
        setattr(layer, name, state[name])
    if facts["cumulative_length"] is not None:
        layer.cumulative_length = int(facts["cumulative_length"])


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() if hasattr(hashlib, "file_digest") else _digest(file)


def _digest(file: Any) -> str:
    digest = hashlib.sha256()  # Python 3.10 has no file_digest
    while chunk := file.read(1 << 20):
        digest.update(chunk)
    return digest.hexdigest()


def _with_string_keys(description: dict[str, Any]) -> dict[str, Any]:
    quant = dict(description["quant_config"])
    quant["layers"] = [[selector, override] for selector, override in quant["layers"].items()]
    return description | {"quant_config": quant}


def _with_layer_keys(quant: dict[str, Any]) -> dict[str, Any]:
    return quant | {"layers": dict(quant["layers"])}
