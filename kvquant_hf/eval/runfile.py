"""Run files: lm-eval's own YAML settings with a list of cache configurations, merged with the command line."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml
from lm_eval.config.evaluate_config import EvaluatorConfig

from kvquant_hf.checks import check_choice, check_keys
from kvquant_hf.config import KVQuantConfig
from kvquant_hf.eval.environment import package_versions
from kvquant_hf.eval.lm import MODEL_NAME
from kvquant_hf.eval.models import model_fingerprint, model_name, resolve_model
from kvquant_hf.eval.settings import parse_quant
from kvquant_hf.query_moments import settings_by_content

_OWN_KEYS = ("caches", "description")
_NESTED = ("model_args", "gen_kwargs", "metadata")
_TRACKERS = ("wandb_args", "wandb_config_args", "trackio_args", "hf_hub_log_args")
# What lm-eval reads of these decides the answers; the rest is about where and how loudly to report.
_DECIDING = (
    "tasks",
    "num_fewshot",
    "batch_size",
    "max_batch_size",
    "device",
    "limit",
    "samples",
    "system_instruction",
    "apply_chat_template",
    "fewshot_as_multiturn",
    "gen_kwargs",
    "seed",
)
_VERSIONS = ("kvquant-hf", "lm-eval", "torch", "transformers")
DEFAULT_CACHES = ("dense", "k4v4")


@dataclass(frozen=True)
class RunFile:
    """One evaluation: a model and tasks, and the caches to run them with.

    Attributes:
        name: Names the output directory and the report.
        settings: lm-eval's settings, validated by lm-eval.
        caches: Resolved cache configurations by name, in the order given.
        resolved_model: What `from_pretrained` takes.
        model_args: Arguments of `KVQuantLM` besides `pretrained` and `quant`.
        description: What the run is about, for its report.
    """

    name: str
    settings: EvaluatorConfig
    caches: Mapping[str, KVQuantConfig]
    resolved_model: str
    model_args: Mapping[str, Any]
    description: str = ""

    @property
    def output(self) -> Path:
        """Directory of the run."""
        return Path(self.settings.output_path)

    def resolved(self, cache: str) -> dict[str, Any]:
        """Everything that decides the answers of one cache configuration, as plain values without local paths."""
        deciding = {name: getattr(self.settings, name) for name in _DECIDING}
        metadata = {k: v for k, v in self.settings.metadata.items() if k not in {"pretrained", "quant", "tokenizer"}}
        return {
            "model": model_name(self.resolved_model),
            "model_fingerprint": model_fingerprint(self.resolved_model),
            "model_args": dict(self.model_args),
            **deciding,
            "metadata": metadata,
            "quant": settings_by_content(self.caches[cache]),
            "versions": {name: found[name] for name in _VERSIONS if name in (found := package_versions())},
        }

    def directory(self, cache: str) -> Path:
        """Output directory of one cache configuration; its name ends with the hash of `resolved`."""
        return self.output / f"{_file_name(cache)}-{config_hash(self.resolved(cache))}"


def config_hash(resolved: Mapping[str, Any]) -> str:
    """Ten hexadecimal digits that change with any setting."""
    text = json.dumps(resolved, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def _file_name(name: str) -> str:
    return "".join(c if c.isalnum() or c in "-_." else "_" for c in name)[:60]


def load_run_file(path: Path | None, overrides: Mapping[str, Any]) -> RunFile:
    """A run from a YAML file and the command line, which wins.

    Args:
        path: The file; without one everything comes from `overrides`.
        overrides: lm-eval's settings and `caches`. `model_args`, `gen_kwargs` and `metadata` are merged key by key.

    Raises:
        FileNotFoundError: There is no such file, or the prepared model it names is not there.
        ValueError: A setting is unknown, missing or not allowed.
    """
    given = _read(path) if path is not None else {}
    known = (*(item.name for item in fields(EvaluatorConfig)), *_OWN_KEYS)
    check_keys("run file", given, known)
    check_keys("command line", overrides, known)
    merged = _merge(given, overrides)
    name = path.stem if path is not None else "eval"
    _refuse(merged)
    model_args = dict(merged.pop("model_args", {}))
    if not isinstance(model_args.get("pretrained"), str):
        raise ValueError("`model_args` must name the model, as in `pretrained=prepared:smollm2-135m`.")
    caches = _caches(merged.pop("caches", None), model_args.pop("quant", None))
    resolved_model = resolve_model(model_args.pop("pretrained"))
    merged.setdefault("output_path", str(Path("out") / name))
    merged.setdefault("device", "cpu")
    description = str(merged.pop("description", ""))
    # Tasks whose data are generated read the tokenizer of the model from their metadata.
    visible = {"pretrained": resolved_model, **model_args}
    merged["tasks"] = _task_names(merged.get("tasks"))
    if str(merged.get("batch_size", "")).isdecimal():
        merged["batch_size"] = int(merged["batch_size"])  # lm-eval's command line leaves it a text
    settings = EvaluatorConfig(**merged | {"model": MODEL_NAME, "model_args": visible, "log_samples": True})
    return RunFile(name, settings._configure(), caches, resolved_model, model_args, description)


def _read(path: Path) -> dict[str, Any]:
    try:
        given = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no run file: {error}") from error
    if not isinstance(given, dict):
        raise ValueError(f"{path} is no run file: it must hold a mapping, got {type(given).__name__}.")
    return given


def _merge(given: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(given)
    for name, value in overrides.items():
        if name in _NESTED and isinstance(value, Mapping):
            merged[name] = {**(merged.get(name) or {}), **value}
        else:
            merged[name] = value
    # A cache named on the command line takes the place of those of the file.
    if "quant" in (overrides.get("model_args") or {}) and "caches" not in overrides:
        merged.pop("caches", None)
    return merged


def _refuse(merged: Mapping[str, Any]) -> None:
    check_choice("model", merged.get("model", MODEL_NAME), (MODEL_NAME,))
    if merged.get("use_cache"):
        raise ValueError(
            "`use_cache` is refused: it finds answers by the request alone and would give those of one cache "
            "configuration to the next. Interrupted runs go on by themselves when the command is repeated."
        )
    for name in _TRACKERS:
        if merged.get(name):
            raise ValueError(f"`{name}` is not supported here: results are files below `output_path`.")


def _task_names(tasks: Any) -> list[str]:
    """One name each, from a list or from words joined by commas."""
    listed = [tasks] if isinstance(tasks, str) else tasks or []
    names = [name.strip() for entry in listed for name in str(entry).split(",") if name.strip()]
    if not names:
        raise ValueError(f"`tasks` must name at least one task, got {tasks!r}.")
    return list(dict.fromkeys(names))


def _caches(listed: Any, single: Any) -> dict[str, KVQuantConfig]:
    if listed is not None and single is not None:
        raise ValueError("Give either `caches` or `quant` in `model_args`, not both.")
    entries = listed if listed is not None else [single] if single is not None else list(DEFAULT_CACHES)
    if not isinstance(entries, Sequence) or isinstance(entries, str) or not entries:
        raise ValueError(f"`caches` must be a list of cache configurations, got {entries!r}.")
    caches: dict[str, KVQuantConfig] = {}
    for entry in entries:
        name, config = _cache(entry)
        if name in caches:
            raise ValueError(f"`caches` names {name!r} twice.")
        caches[name] = config
    return caches


def _cache(entry: Any) -> tuple[str, KVQuantConfig]:
    """Name and settings of an entry: a word as `parse_quant` takes it, a mapping of settings, or `{name, quant}`."""
    if isinstance(entry, Mapping) and "quant" in entry:
        check_keys("caches", entry, ("name", "quant"))
        name, config = _cache(entry["quant"])
        return str(entry.get("name", name)), config
    if isinstance(entry, Mapping):
        return "custom", KVQuantConfig.from_dict(entry)
    return Path(str(entry)).stem if str(entry).endswith((".yaml", ".yml")) else str(entry), parse_quant(str(entry))
