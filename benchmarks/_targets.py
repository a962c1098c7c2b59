"""What the project wants to reach, as ratios; `None` where it has set itself no target."""

_SMALL, _LARGE = "1,3,3,64", "1,8,4,128"
_SDPA = {
    _SMALL: {1024: 4.5, 4096: 5.5, 16384: 5.5, 65536: 5.5},
    _LARGE: {1024: 4.5, 4096: 4.5, 16384: 5.0, 65536: 5.0},
}
_STEPS = {
    ("dynamic", "float32"): {512: 0.97, 4096: 1.5, 8192: 2.0},
    ("dynamic", "bfloat16"): {512: 0.97, 4096: 3.5, 8192: 6.0},
    ("hf-quanto", "float32"): {4096: 2.0},
}
QUANT = "k4v4"
MODEL = "smollm2-135m"
# A flush may not make a step longer than this many median steps.
SLOWEST_STEP = 2.0
# Microseconds per layer and step that the cache costs outside its attention kernel.
OVERHEAD_US = 30.0
# Quantizing and packing a prompt, as a share of the model's own prefill.
QUANTIZE_SHARE = 0.05


def attention_target(quant: str, shape: str, context: int, baseline: str) -> float | None:
    """Least speedup of a decode attention call."""
    if quant != QUANT or shape not in _SDPA:
        return None
    if baseline == "sdpa":
        return _SDPA[shape].get(context)
    if baseline == "same-kernel-bf16":
        return 1.5 if context >= 4096 else None
    # At most 1.3 times slower than without a rotation.
    return 1 / 1.3 if baseline == "post-rope" else None


def step_target(model: str, quant: str, dtype: str, context: int, baseline: str) -> float | None:
    """Least ratio of a baseline's decode step to ours."""
    if quant != QUANT or not is_target_model(model):
        return None
    return _STEPS.get((baseline, dtype), {}).get(context)


def is_target_model(model: str) -> bool:
    """Whether the end-to-end targets are about this model."""
    return model.rsplit("/", 1)[-1].lower().startswith(MODEL)
