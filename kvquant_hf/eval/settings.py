"""Cache settings as one word of a command line."""

import re
from typing import Any

import yaml

from kvquant_hf.config import KVQuantConfig

# A comma inside a value, as in `layers={0: {...}, 1: {...}}`, does not start another setting.
_SEPARATOR = re.compile(r",(?=[A-Za-z_][\w.]*=)")


def parse_quant(text: str) -> KVQuantConfig:
    """Settings from `PRESET_OR_YAML_PATH[,setting=value…]`.

    A setting is a top-level field of `KVQuantConfig` or a field of one of its parts; values are read as YAML:
    `k2v2,residual_length=64`, `my.yaml,key.nbits=3,layers={0: {key: {nbits: 8}}}`.

    Raises:
        ValueError: The text has another form, or a preset, setting or value is unknown.
        FileNotFoundError: There is no such YAML file.
    """
    base, *settings = _SEPARATOR.split(text)
    overrides: dict[str, Any] = {}
    for setting in settings:
        name, _, value = setting.partition("=")
        try:
            parsed = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ValueError(f"`{name}` must have a YAML value, got {value!r}.") from error
        part, _, inner = name.partition(".")
        if inner:
            overrides.setdefault(part, {})[inner] = parsed
        else:
            overrides[name] = parsed
    return KVQuantConfig.resolve(base, **overrides)
