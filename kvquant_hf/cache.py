"""`QuantCache`: the cache a user passes to `generate`."""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer

from kvquant_hf import _compat
from kvquant_hf.config import KVQuantConfig
from kvquant_hf.guard import guarded
from kvquant_hf.layer import QuantLayer
from kvquant_hf.memory import MemoryReport, report_of
from kvquant_hf.misuse import check_generate_call, check_positions, longrope_switch, warn_before_switch
from kvquant_hf.ops import available_backends
from kvquant_hf.other_layers import drop_views
from kvquant_hf.padding import padding_of_mask, padding_of_positions, repeated_padding
from kvquant_hf.query_moments import QueryMoments, moments_of
from kvquant_hf.rope_probe import find_rotations
from kvquant_hf.rotation import check_rotations

# What a saved cache and the model that continues it must agree on, as the model's config names it.
_MODEL_FACTS = ("model_type", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")


class QuantCache(Cache):
    """A Transformers cache that stores keys and values in 2 to 8 bits.

    Keys are quantized per channel before the rotary embedding, values per token; the first tokens and the newest ones
    stay exact (KIVI, arXiv 2402.02750; KVQuant, arXiv 2401.18079; StreamingLLM, arXiv 2309.17453). Full-attention
    layers are quantized; layers of other types use Transformers' own classes.

    Example:
        ```python
        cache = QuantCache(model.config, "k4v4")
        out = model.generate(**inputs, past_key_values=cache)
        print(cache.memory_report())
        ```

    Args:
        config: Config of the model, or the model. Of a composite config the text decoder counts.
        quant: Preset name (`list_presets()`), path of a YAML file, mapping, or `KVQuantConfig`.
        query_moments: What the model's queries look like, or the file that says so; key channels are then rounded
            together, so that scores suffer least (see `QueryMoments`).
        overrides: Top-level fields of `KVQuantConfig`, such as `residual_length=64` or `key={"nbits": 8}`.

    Raises:
        ValueError: A setting is unknown or not allowed, a rotation or an order of channels does not serve the heads of
            a layer, the model has no layer that can be quantized, or the query moments are not those of such a model.
        FileNotFoundError: There is no file with query moments where the settings say so.
    """

    def __init__(
        self,
        config: PreTrainedConfig | PreTrainedModel,
        quant: str | Path | Mapping[str, Any] | KVQuantConfig = "k4v4",
        *,
        query_moments: QueryMoments | str | Path | None = None,
        **overrides: Any,
    ) -> None:
        if isinstance(query_moments, (str, Path)):
            overrides["query_moments"] = str(query_moments)
        self.quant_config = KVQuantConfig.resolve(quant, **overrides)
        self.query_moments = moments_of(query_moments, self.quant_config.query_moments)
        backends = ("auto", "dense", *available_backends())
        if self.quant_config.backend not in backends:
            raise ValueError(
                f"`backend` must be one of {backends} in this installation, got {self.quant_config.backend!r}."
            )
        text_config = _text_config(config)
        self.layer_types, layers = _compat.layer_types_and_classes(text_config)
        self._quant_layers = [i for i, layer in enumerate(layers) if type(layer) is DynamicLayer]
        if not self._quant_layers:
            raise ValueError(
                f"`config` must have full-attention layers to quantize, it has layers of types "
                f"{sorted(set(self.layer_types))}."
            )
        self.quant_config.check_layers(len(layers), self.layer_types)
        rotations = find_rotations(config)
        self._whole_heads = {i: rotations[i].num_heads for i in self._quant_layers}
        for i in self._quant_layers:
            layer_config = self.quant_config.for_layer(i, len(layers), self.layer_types[i])
            check_rotations(layer_config, rotations[i].head_dims, i)
            if layer_config.has_guard:
                guarded(layer_config.key)  # refuses what it cannot widen before there is anything to lose
            moments = self.query_moments if layer_config.key.is_quantized else None
            feedback = None if moments is None else moments.feedback(i, layer_config.key)
            layers[i] = QuantLayer(
                layer_config,
                rotations[i].rotation,
                rotations[i].reason,
                feedback,
                self._whole_heads[i],
                rotations[i].scaling,
            )
        self._fresh_layers = {i: copy.deepcopy(layer) for i, layer in enumerate(layers) if i not in self._quant_layers}
        self.model_facts = {name: getattr(text_config, name, None) for name in _MODEL_FACTS}
        self._longrope_switch = longrope_switch(text_config)
        self._padding: torch.Tensor | None = None
        self._user_defined = False
        super().__init__(layers=layers)

    # ---- what generate tells -----------------------------------------------------------------------------------

    @property
    def _is_user_defined(self) -> bool:
        """Set by `generate` on a cache that the user passed, before the first forward."""
        return self._user_defined

    @_is_user_defined.setter
    def _is_user_defined(self, value: bool) -> None:
        self._user_defined = value
        call = _compat.current_generate_call(1) if value else None
        if call is not None:
            check_generate_call(call, self.get_seq_length())
            if call.attention_mask is not None:
                self._padding = padding_of_mask(call.attention_mask)

    def set_padding(self, attention_mask: torch.Tensor) -> None:
        """Say where the rows of a left-padded batch begin, so that padding takes no sinks and widens no range.

        `generate` needs no such call. It is for forward calls of your own that pass no `position_ids` derived from
        the mask (and on Transformers before 5.24, where caches do not see position ids).

        Args:
            attention_mask: `[B, T]` of the prompt, zero on padding.

        Raises:
            ValueError: The cache already holds tokens, or the mask is not two-dimensional.
        """
        if self.get_seq_length():
            raise ValueError("`set_padding` must be called on an empty cache; this one holds tokens.")
        self._padding = padding_of_mask(attention_mask)

    # ---- the Transformers contract -----------------------------------------------------------------------------

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new keys and values of a layer and return what its attention should read.

        Args:
            key_states: `[B, H, t, D]`, after the model's rotary embedding.
            value_states: `[B, H, t, D_v]`.
            layer_idx: The layer.
            args: Passed on to layers that are not quantized.
            kwargs: Likewise; `position_ids` within `kwargs["kwargs"]` reveal left padding and a misplaced prompt.

        Returns:
            See `QuantLayer.update`.

        Raises:
            ValueError: The new tokens cannot continue what is stored. Nothing has changed then.
        """
        layer: Any = self.layers[layer_idx]
        if not isinstance(layer, QuantLayer):
            result: tuple[torch.Tensor, torch.Tensor] = layer.update(key_states, value_states, *args, **kwargs)
            drop_views(layer)
            return result
        if key_states.shape[-2] != 1 or not layer.get_seq_length():
            self._prepare_layer(layer, key_states, kwargs.get("kwargs") or {})
        if layer_idx == self._quant_layers[0] and self._longrope_switch is not None:
            warn_before_switch(self._longrope_switch, layer.get_seq_length(), key_states.shape[-2])
        return layer.update(key_states, value_states)

    def _prepare_layer(self, layer: QuantLayer, key_states: torch.Tensor, forward_kwargs: Mapping[str, Any]) -> None:
        """Check positions against what is stored, and tell an empty layer the padding of its batch."""
        position_ids = forward_kwargs.get("position_ids")
        if not isinstance(position_ids, torch.Tensor) or position_ids.ndim != 2 or key_states.shape[-2] < 2:
            position_ids = None
        held = layer.get_seq_length()
        if held:
            if position_ids is not None and layer is self.layers[self._quant_layers[0]]:
                check_positions(position_ids, held, self._padding)
            return
        if self._padding is None and position_ids is not None and position_ids.shape[0] == key_states.shape[0]:
            self._padding = padding_of_positions(position_ids)
        if self._padding is not None:
            layer.set_padding(repeated_padding(self._padding, key_states.shape[0], key_states.device))

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens stored in a layer; for the default also where layer 0 does not count them."""
        if layer_idx == 0 and not isinstance(self.layers[0], CacheLayerMixin):
            return self.quantized_layer(self._quant_layers[0]).get_seq_length()
        return int(super().get_seq_length(layer_idx))

    def reset(self) -> None:
        """Forget everything; the cache is as new, also for another batch size or dtype."""
        for i, layer in enumerate(self.layers):
            if isinstance(layer, QuantLayer):
                layer.reset()
            else:
                # Transformers before 5.20 zeroes what its layers hold and appends to the zeros.
                self.layers[i] = copy.deepcopy(self._fresh_layers[i])
        self._padding = None

    def _others_first(self) -> list[Any]:
        """Layers in an order in which those of Transformers, which may refuse, come before anything has changed."""
        return sorted(self.layers, key=lambda layer: isinstance(layer, QuantLayer))

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Make row `i` what row `beam_idx[i]` was, in every layer."""
        for layer in self._others_first():
            layer.reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Put `repeats` copies of each row side by side, in every layer."""
        for layer in self._others_first():
            layer.batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows `indices` (int64, or a boolean mask), in every layer."""
        for layer in self._others_first():
            layer.batch_select_indices(indices)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the newest `-tokens_to_remove` tokens, see `QuantLayer.crop`.

        Raises:
            ValueError: The count is positive.
            RuntimeError: A sliding layer of Transformers no longer holds what a shorter sequence would need. Nothing
                has changed then.
        """
        tokens_to_remove = int(tokens_to_remove)
        if tokens_to_remove > 0:
            raise ValueError(
                f"`tokens_to_remove` must be zero or negative, the number of tokens to remove; got {tokens_to_remove}."
            )
        for layer in self._others_first():
            layer.crop(tokens_to_remove)
        if not self.get_seq_length():
            self._padding = None

    def offload(self, layer_idx: int, only_non_sliding: bool = True) -> None:
        """Move what a layer stores to the CPU, sliding layers only on request."""
        if not (only_non_sliding and self.is_sliding[layer_idx]):
            cast(Any, self.layers[layer_idx]).offload()

    def prefetch(self, layer_idx: int, only_non_sliding: bool = True) -> None:
        """Bring what a layer stores back to its device; an update of the layer does so by itself."""
        if not (only_non_sliding and self.is_sliding[layer_idx]):
            cast(Any, self.layers[layer_idx]).prefetch()

    # ---- looking inside ----------------------------------------------------------------------------------------

    @property
    def quantized_layers(self) -> tuple[int, ...]:
        """Indices of the layers that are quantized, ascending."""
        return tuple(self._quant_layers)

    @property
    def guarded_layers(self) -> tuple[int, ...]:
        """Indices of the layers whose keys a guard stores in more bits, ascending."""
        return tuple(i for i in self._quant_layers if cast(QuantLayer, self.layers[i]).is_guarded)

    def quantized_layer(self, layer_idx: int) -> QuantLayer:
        """The quantized layer at an index (negative counts from the end).

        Raises:
            ValueError: There is none; the layers that are quantized are named.
        """
        wanted = layer_idx + len(self.layers) if layer_idx < 0 else layer_idx
        if wanted not in self._quant_layers:
            raise ValueError(f"`layer_idx` must be one of the quantized layers {self._quant_layers}, got {layer_idx}.")
        return cast(QuantLayer, self.layers[wanted])

    def dequantize(self, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What attention of a layer reads.

        Args:
            layer_idx: A quantized layer.

        Returns:
            Keys (after RoPE) and values, `[B, H_kv, T, D]` each, in the model's dtype.

        Raises:
            ValueError: The layer is not quantized.
            RuntimeError: The layer is empty.
        """
        return self.quantized_layer(layer_idx).dequantize()

    def quantized_length(self, layer_idx: int) -> int:
        """Tokens that a quantized layer holds as codes."""
        return self.quantized_layer(layer_idx).quantized_length

    def memory_report(self) -> MemoryReport:
        """Bytes held by part, compared with what `DynamicCache` would hold.

        Under tensor parallelism these are the bytes of this process, see `MemoryReport.joined`.
        """
        return report_of(self.layers, self._whole_heads)

    def __repr__(self) -> str:
        lines = [
            f"QuantCache({len(self._quant_layers)} of {len(self.layers)} layers quantized, "
            f"{self.get_seq_length()} tokens, backend {self.quant_config.backend})"
        ]
        if self.query_moments is not None:
            lines.append(f"  keys rounded by {self.query_moments}")
        texts = [repr(layer) for layer in self.layers]
        first = 0
        for i in range(1, len(texts) + 1):
            if i == len(texts) or texts[i] != texts[first]:
                which = f"layer {first}" if i == first + 1 else f"layers {first}-{i - 1}"
                kind = self.layer_types[first]
                lines.append(f"  {which} ({kind}): {texts[first]}")
                first = i
        return "\n".join(lines)

    # ---- files -------------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write the cache to a directory (safetensors and JSON), see `kvquant_hf.serialization`."""
        from kvquant_hf.serialization import save_cache

        save_cache(self, Path(path))

    @classmethod
    def load(
        cls,
        path: str | Path,
        config: PreTrainedConfig | PreTrainedModel,
        device: str | torch.device = "cpu",
        *,
        query_moments: QueryMoments | str | Path | None = None,
    ) -> "QuantCache":
        """Read a cache that `save` wrote.

        Args:
            path: The directory.
            config: Config of the model the cache belongs to, or the model.
            device: Where the tensors go.
            query_moments: Those the cache was made with, if any; by default from the file that its settings name.

        Raises:
            FileNotFoundError: There is no saved cache at `path`, or no file with its query moments.
            ValueError: What is there is damaged, of another kind or version, or of another model, or was made with
                other query moments: later tokens would be rounded otherwise than the first ones.
        """
        from kvquant_hf.serialization import load_cache

        return load_cache(cls, Path(path), config, torch.device(device), query_moments)


def _text_config(config: object) -> PreTrainedConfig:
    """The text decoder's config of a config or model."""
    config = getattr(config, "config", config) if isinstance(config, torch.nn.Module) else config
    if not isinstance(config, PreTrainedConfig):
        raise ValueError(f"`config` must be a PreTrainedConfig or a model that has one, got {type(config).__name__}.")
    if config.is_encoder_decoder:
        raise ValueError("`config` must be that of a decoder-only model, got an encoder-decoder config.")
    return config.get_text_config(decoder=True)
