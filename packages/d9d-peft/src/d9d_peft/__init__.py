"""Composable parameter-efficient fine-tuning for PyTorch."""

from typing import TYPE_CHECKING

from d9d_dist.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from d9d_peft._targets import Target
    from d9d_peft.active import adapters_off, original_weights, use_adapter
    from d9d_peft.adapter import DEFAULT_ADAPTER, Adapter
    from d9d_peft.adapter_load import load_adapters
    from d9d_peft.adapter_save import save_adapters
    from d9d_peft.block_format import BlockFormat
    from d9d_peft.dora import DoRA, DoraAdapter
    from d9d_peft.full_tune import FullTune
    from d9d_peft.lora import LoRA, LoraAdapter
    from d9d_peft.low_rank import LowRank
    from d9d_peft.merge import merge_
    from d9d_peft.method import PeftMethod, Plan, first_names, inject
    from d9d_peft.quantized_base import QuantizedWeight, quantize_base
    from d9d_peft.stack import Stack
else:
    __getattr__, __dir__ = lazy_exports(__name__)

__all__ = [
    "DEFAULT_ADAPTER",
    "Adapter",
    "BlockFormat",
    "DoRA",
    "DoraAdapter",
    "FullTune",
    "LoRA",
    "LoraAdapter",
    "LowRank",
    "PeftMethod",
    "Plan",
    "QuantizedWeight",
    "Stack",
    "Target",
    "adapters_off",
    "first_names",
    "inject",
    "load_adapters",
    "merge_",
    "original_weights",
    "quantize_base",
    "save_adapters",
    "use_adapter",
]
