"""Composable parameter-efficient fine-tuning for PyTorch."""

from d9d_peft.adapters import load_adapters, save_adapters
from d9d_peft.full_tune import FullTune
from d9d_peft.lora import LoRA, LoraLinear
from d9d_peft.merge import MergeableAdapter, merge_
from d9d_peft.method import PeftMethod, Plan, Replacement, first_names, inject
from d9d_peft.stack import Stack

__all__ = [
    "FullTune",
    "LoRA",
    "LoraLinear",
    "MergeableAdapter",
    "PeftMethod",
    "Plan",
    "Replacement",
    "Stack",
    "first_names",
    "inject",
    "load_adapters",
    "merge_",
    "save_adapters",
]
