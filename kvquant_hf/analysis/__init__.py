"""Where quantization error enters attention, tests of published findings, budgets, levels and orders by layer."""

from kvquant_hf.analysis.ablation import Ablation, load_ablation
from kvquant_hf.analysis.attention_error import FACTS_NAME, analyze_window
from kvquant_hf.analysis.budget import Budget
from kvquant_hf.analysis.calibration import Calibration, calibrate
from kvquant_hf.analysis.candidates import Candidates, default_candidates, load_candidates
from kvquant_hf.analysis.channel_orders import OrderCalibration, SideOrder, calibrate_orders
from kvquant_hf.analysis.claims import Claim, Verdict, judge, verdict_lines
from kvquant_hf.analysis.level_calibration import LevelCalibration, SideLevels, calibrate_levels
from kvquant_hf.analysis.measures import ERRORS, FACTS, HeadSums, Measure
from kvquant_hf.analysis.meter import Meter
from kvquant_hf.analysis.run import Device, Measured, measure
from kvquant_hf.capture import LayerActivations, capture

__all__ = [
    "ERRORS",
    "FACTS",
    "FACTS_NAME",
    "Ablation",
    "Budget",
    "Calibration",
    "Candidates",
    "Claim",
    "Device",
    "HeadSums",
    "LayerActivations",
    "LevelCalibration",
    "Measure",
    "Measured",
    "Meter",
    "OrderCalibration",
    "SideLevels",
    "SideOrder",
    "Verdict",
    "analyze_window",
    "calibrate",
    "calibrate_levels",
    "calibrate_orders",
    "capture",
    "default_candidates",
    "judge",
    "load_ablation",
    "load_candidates",
    "measure",
    "verdict_lines",
]
