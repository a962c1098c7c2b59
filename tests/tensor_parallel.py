"""One process of a tensor-parallel model; tests start two by `torchrun` and compare them with one.

torchrun --nproc-per-node 2 tests/tensor_parallel.py MODEL_DIR OUT_DIR
"""

import importlib.util
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.distributed import DistributedConfig

from kvquant_hf import QuantCache
from kvquant_hf._compat import cache_kwargs

CACHES = {
    "k4v4": {"quant": "k4v4"},
    "k2v2": {"quant": "k2v2", "residual_length": 16},
    "kivi-int2": {"quant": "kivi-int2", "residual_length": 32},
    "layers": {"quant": "k4v4", "residual_length": 16, "layers": {0: {"key": {"nbits": 8}}}, "sink_length": 2},
}
HAS_LM_EVAL = importlib.util.find_spec("lm_eval") is not None


def generated(model: PreTrainedModel) -> dict[str, Any]:
    """What a padded batch generates with the dense cache and with quantized ones, and what these hold then."""
    ids = torch.randint(2, 200, (2, 180), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, :40] = 0
    ids[1, :40] = 0
    options = {"attention_mask": mask, "max_new_tokens": 24, "do_sample": False}
    dense = model.generate(ids, **options, **cache_kwargs(DynamicCache(config=model.config)))
    found: dict[str, Any] = {"dense": {"ids": dense}}
    for name, settings in CACHES.items():
        cache = QuantCache(model.config, **settings)
        beams = {"num_beams": 2} if name == "layers" else {}
        found[name] = {
            "ids": model.generate(ids, **options, **beams, **cache_kwargs(cache)),
            "layers": [cache.dequantize(i) for i in range(len(cache.layers))],
            "quantized": cache.quantized_length(0),
            "report": cache.memory_report().to_dict(),
            "table": str(cache.memory_report()),
        }
    return found


def evaluated(directory: str, **model_args: Any) -> dict[str, Any]:
    """Answers of the lm-eval model, and what its caches held."""
    from lm_eval.api.instance import Instance

    from kvquant_hf.eval.lm import KVQuantLM

    text = "The square of seven is forty-nine, its cube is larger. " * 4
    prompts = [text[:n] for n in (80, 200, 120)]
    lm = KVQuantLM(directory, "k2v2,residual_length=16", dtype="float32", batch_size=2, device="cpu", **model_args)
    settings = {"until": ["\n\n"], "max_gen_toks": 12, "do_sample": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of unequal lengths
        texts = lm.generate_until(
            [Instance("generate_until", {}, (prompt, dict(settings)), i) for i, prompt in enumerate(prompts)]
        )
        sums = lm.loglikelihood([Instance("loglikelihood", {}, (p, " is prime"), i) for i, p in enumerate(prompts)])
    info = lm.get_model_info()
    return {
        "texts": texts,
        "sums": [value for value, _ in sums],
        "reports": [call.report.to_dict() for call in lm.calls],
        "processes": info["kvquant_processes"],
    }


def main(directory: str, out: str) -> None:
    plan = DistributedConfig(tp_plan="auto")
    model = AutoModelForCausalLM.from_pretrained(directory, distributed_config=plan).eval()
    try:
        found = {"tp_size": model.tp_size, "generated": generated(model)}
        if HAS_LM_EVAL:
            found["evaluated"] = evaluated(directory, tp_plan="auto")
        torch.save(found, Path(out) / f"{os.environ['RANK']}.pt")
    finally:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
