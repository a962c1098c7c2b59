"""What a model's queries look like, so that keys can be rounded where queries do not look.

A score is `q·k`, so an error `e` of a key costs `(q·e)²`, on average `eᵀ M e` with the second moment `M` of queries.
The queries of a head favour few directions. Rounding the channels of a key one after the other, each time correcting
the channels still to come for the errors made so far, moves the error into the other directions: codes, scales and
zero points stay as many as before, and reading is the same. For weights the method is GPTQ's (arXiv 2210.17323,
section 3) in the form of LDLQ (QuIP, arXiv 2307.13304, section 3.1).
"""

import hashlib
from collections.abc import Callable, Mapping
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import PreTrainedModel

from kvquant_hf.config import KVQuantConfig
from kvquant_hf.rope import KeyRotation
from kvquant_hf.rotation import rotate
from kvquant_hf.spec import QuantSpec

FORMAT = "kvquant_hf.query_moments"
# Tokens at the start of a text whose queries are left out: they attend to themselves.
_SKIP = 4
# Distances between query and key over which moments are averaged.
_DISTANCES = tuple(round(8 * 2 ** (step / 4)) for step in range(33))
# Shares of the diagonal added to it: what few queries say of two channels together is trusted less than of one.
_SHRINK = 0.1
_DAMP = 0.01


class QueryMoments:
    """Second moments of a model's queries, for each layer and key/value head.

    Collected once per model, from any text, and used by all its caches:

    ```python
    moments = QueryMoments.collect(model, tokenizer(text, return_tensors="pt").input_ids)
    moments.save("moments.safetensors")
    cache = QuantCache(model.config, "k2v2", query_moments=moments)  # or the path
    ```

    Args:
        moments: `[H_kv, D, D]`, float32, by layer index: means of `q qᵀ` over the query heads that share a key/value
            head, as unrotated keys meet them (turned by the rotary embedding of the distance, and averaged over
            distances of 8 to 2048 tokens).
        num_tokens: Queries they were collected from.

    Raises:
        ValueError: A moment has another shape, is not finite, or there is none.
    """

    def __init__(self, moments: Mapping[int, torch.Tensor], num_tokens: int) -> None:
        if not moments:
            raise ValueError("`moments` must hold at least one layer, got none.")
        for layer_idx, moment in moments.items():
            if moment.ndim != 3 or moment.shape[1] != moment.shape[2] or not bool(torch.isfinite(moment).all()):
                raise ValueError(
                    f"`moments[{layer_idx}]` must be finite and have the shape [H_kv, D, D], got {list(moment.shape)}."
                )
        self._moments = {layer_idx: moments[layer_idx].float().cpu() for layer_idx in sorted(moments)}
        self.num_tokens = num_tokens
        self._feedback: dict[tuple[int, str, tuple[int, ...]], torch.Tensor] = {}

    def __repr__(self) -> str:
        heads, head_dim = next(iter(self._moments.values())).shape[:2]
        return (
            f"QueryMoments({len(self._moments)} layers, {heads} heads of size {head_dim}, {self.num_tokens} queries, "
            f"{self.fingerprint})"
        )

    @property
    def layers(self) -> tuple[int, ...]:
        """Indices of the layers there are moments of."""
        return tuple(self._moments)

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the moments: the codes of two caches agree only if theirs do."""
        digest = hashlib.sha256()
        for layer_idx, moment in self._moments.items():
            digest.update(f"{layer_idx} {tuple(moment.shape)} ".encode() + moment.numpy().tobytes())
        return digest.hexdigest()[:16]

    def __getitem__(self, layer_idx: int) -> torch.Tensor:
        """Moments of a layer, `[H_kv, D, D]`, float32."""
        return self._moments[layer_idx]

    @classmethod
    def collect(
        cls, model: PreTrainedModel, input_ids: torch.Tensor, progress: Callable[[], object] | None = None
    ) -> "QueryMoments":
        """Run texts through a model and keep the moments of its queries.

        A few thousand tokens serve; of several kinds of text they serve better than of one.

        Args:
            model: Causal language model in eval mode whose attention goes through Transformers' attention interface.
            input_ids: `[num_texts, T]` or `[T]`, integer, without padding, on the model's device.
            progress: Called after each text.

        Raises:
            ValueError: `input_ids` has another form, or the model's queries cannot be observed.
        """
        from kvquant_hf.cache import QuantCache  # which needs this module
        from kvquant_hf.capture import LayerActivations, capture
        from kvquant_hf.rope_probe import find_rotations

        if input_ids.ndim not in (1, 2) or input_ids.is_floating_point() or input_ids.shape[-1] <= _SKIP:
            raise ValueError(
                f"`input_ids` must be integers [num_texts, T] with T > {_SKIP}, got {list(input_ids.shape)} of "
                f"{input_ids.dtype}."
            )
        wanted = QuantCache(model).quantized_layers
        rotations = find_rotations(model)
        sums: dict[int, torch.Tensor] = {}
        texts = input_ids[None] if input_ids.ndim == 1 else input_ids
        num_queries = texts.shape[0] * (texts.shape[1] - _SKIP)

        def consume(layer: LayerActivations) -> None:
            query = layer.query[0].float()
            rotation = rotations[layer.layer_idx].rotation
            if rotation is not None:
                rotation = rotation.for_length(texts.shape[1])
                angles = rotation.tables(torch.arange(_SKIP, texts.shape[1], device=query.device))
                query = rotation.apply(query, *angles, inverse=True)
            heads = layer.key.shape[1]
            grouped = query.unflatten(0, (heads, -1)).flatten(1, 2)  # [H_kv, G · N, D]
            moment = (grouped.transpose(-1, -2) @ grouped).cpu() / (num_queries * query.shape[0] / heads)
            sums[layer.layer_idx] = sums.get(layer.layer_idx, 0) + moment

        for text in texts:
            capture(model, text, wanted, consume, queries=texts.shape[1] - _SKIP)
            if progress is not None:
                progress()
        turned = {
            layer_idx: moment if (rotation := rotations[layer_idx].rotation) is None else _turned(moment, rotation)
            for layer_idx, moment in sums.items()
        }
        return cls(turned, num_queries)

    def save(self, path: str | Path) -> None:
        """Write the moments to a safetensors file."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        tensors = {f"layers.{layer_idx}": moment.contiguous() for layer_idx, moment in self._moments.items()}
        save_file(tensors, path, metadata={"format": FORMAT, "num_tokens": str(self.num_tokens)})

    @classmethod
    def load(cls, path: str | Path) -> "QueryMoments":
        """Read what `save` wrote.

        Raises:
            FileNotFoundError: There is no such file.
            ValueError: The file holds something else.
        """
        path = Path(path)
        if not path.is_file():
            raise FileNotFoundError(f"There is no file {path} with query moments; `QueryMoments.collect` makes them.")
        try:
            with safe_open(path, "pt") as file:
                metadata = file.metadata() or {}
                if metadata.get("format") != FORMAT:
                    raise ValueError(f"{path} does not hold query moments of kvquant_hf.")
                names = [name for name in file.keys() if name.startswith("layers.")]  # noqa: SIM118
                moments = {int(name.removeprefix("layers.")): file.get_tensor(name) for name in names}
                return cls(moments, int(metadata["num_tokens"]))
        except (SafetensorError, KeyError) as error:
            raise ValueError(f"{path} is damaged: {error}") from error

    def feedback(self, layer_idx: int, spec: QuantSpec) -> torch.Tensor:
        """How an error of one channel of a key is made good in those that are rounded after it.

        Args:
            layer_idx: The layer.
            spec: How its keys are stored.

        Returns:
            `[H_kv, D, D]`, float32, zero on and above the diagonal: entry `[h, j, i]` is what channel `i` is lowered
            by for each unit of error in channel `j`. Channels are rounded from the last to the first.

        Raises:
            ValueError: There are no moments of the layer, its keys are stored per token or mixed across heads, or
                their `channel_order` is one of another head size.
        """
        if spec.granularity != "per_channel":
            raise ValueError(
                f"`query_moments` serves keys per channel; layer {layer_idx} has key.granularity={spec.granularity!r}."
            )
        if spec.rotation == "grouped_heads":
            raise ValueError(
                f"`query_moments` serve keys whose `rotation` is one of ('none', 'hadamard', 'hadamard_signs'), got "
                f"{spec.rotation!r} in layer {layer_idx}: an error would reach the queries of several heads."
            )
        if layer_idx not in self._moments:
            raise ValueError(f"`query_moments` has the layers {list(self.layers)}, not {layer_idx}.")
        basis = spec.rotation, spec.channel_order
        key = (layer_idx, *basis)
        if key not in self._feedback:
            moment = self._moments[layer_idx].double()
            moment = rotate(rotate(moment, *basis).transpose(-1, -2), *basis)
            self._feedback[key] = _feedback(moment).float()
        return self._feedback[key]


def settings_by_content(config: KVQuantConfig) -> dict[str, Any]:
    """`KVQuantConfig.to_dict` with the fingerprint of query moments for their path: what decides a cache's numbers.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file holds something else.
    """
    path = config.query_moments
    return config.to_dict() | ({} if path is None else {"query_moments": load_once(path).fingerprint})


def moments_of(given: object, path: str | None) -> QueryMoments | None:
    """The moments of an argument that is them, or else those of the file that the settings name, if any.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The argument is neither moments nor a path nor `None`, or the file holds something else.
    """
    if given is not None and not isinstance(given, (str, Path, QueryMoments)):
        raise ValueError(f"`query_moments` must be a QueryMoments, a path or None, got {given!r}.")
    if isinstance(given, QueryMoments):
        return given
    return None if path is None else load_once(path)


def load_once(path: str) -> QueryMoments:
    """`QueryMoments.load`, which reads a file again only when it has changed.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file holds something else.
    """
    found = Path(path)
    facts = found.stat() if found.is_file() else None
    return _load_once(path, 0 if facts is None else facts.st_mtime_ns, 0 if facts is None else facts.st_size)


@lru_cache(maxsize=8)
def _load_once(path: str, _mtime_ns: int, _size: int) -> QueryMoments:
    return QueryMoments.load(path)


def _turned(moment: torch.Tensor, rotation: KeyRotation) -> torch.Tensor:
    """Mean of `R M Rᵀ` over the rotations `R` of the distances."""
    tables = rotation.for_length(max(_DISTANCES)).tables(torch.tensor(_DISTANCES))
    total = torch.zeros_like(moment)
    for cos, sin in zip(*tables, strict=True):
        half = rotation.apply(moment, cos, sin).transpose(-1, -2)
        total += rotation.apply(half, cos, sin)
    return total / len(_DISTANCES)


def _feedback(moment: torch.Tensor) -> torch.Tensor:
    """Strictly lower part of `L` in `M = L D Lᵀ`, `L` with a unit diagonal; `M` is `[H, D, D]`, float64.

    With it `eᵀ M e = Σᵢ Dᵢ (eᵢ + Σ_{j>i} L_ji e_j)²`: a channel that is rounded after the later ones leaves of its
    term no more than its own rounding.
    """
    diagonal = moment.diagonal(dim1=-2, dim2=-1)
    mean = diagonal.mean(-1, keepdim=True)
    added = _SHRINK * diagonal + _DAMP * torch.where(mean > 0, mean, 1.0)
    lower: torch.Tensor = torch.linalg.cholesky(moment + torch.diag_embed(added))
    return (lower / lower.diagonal(dim1=-2, dim2=-1)[..., None, :]).tril(-1)
