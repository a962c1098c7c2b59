"""Where quantization error enters attention, on real activations, and ablations that test published findings."""

from kvquant_hf.analysis.ablation import Ablation, load_ablation
from kvquant_hf.analysis.attention_error import FACTS_NAME, analyze_window
from kvquant_hf.analysis.claims import Claim, Verdict, judge, verdict_lines
from kvquant_hf.analysis.measures import ERRORS, FACTS, HeadSums, Measure
from kvquant_hf.analysis.run import Device, Measured, measure
from kvquant_hf.capture import LayerActivations, capture

__all__ = [
    "ERRORS",
    "FACTS",
    "FACTS_NAME",
    "Ablation",
    "Claim",
    "Device",
    "HeadSums",
    "LayerActivations",
    "Measure",
    "Measured",
    "Verdict",
    "analyze_window",
    "capture",
    "judge",
    "load_ablation",
    "measure",
    "verdict_lines",
]
