"""Composable parameter-efficient fine-tuning for PyTorch."""

from typing import TYPE_CHECKING

from d9d_dist.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from d9d_peft.active import adapters_off as adapters_off
    from d9d_peft.active import original_weights as original_weights
    from d9d_peft.active import use_adapter as use_adapter
    from d9d_peft.adapter import Adapter as Adapter
    from d9d_peft.adapter_load import load_adapters as load_adapters
    from d9d_peft.adapter_method import stored_method as stored_method
    from d9d_peft.adapter_save import save_adapters as save_adapters
    from d9d_peft.all_linear import linear_layers as linear_layers
    from d9d_peft.block_format import fake_quantize as fake_quantize
    from d9d_peft.dora import DoRA as DoRA
    from d9d_peft.full_tune import FullTune as FullTune
    from d9d_peft.lora import LoRA as LoRA
    from d9d_peft.merge import merge_ as merge_
    from d9d_peft.method import PeftMethod as PeftMethod
    from d9d_peft.method import Plan as Plan
    from d9d_peft.method import inject as inject
    from d9d_peft.quantized_base import quantize_base as quantize_base
    from d9d_peft.stack import Stack as Stack
    from d9d_peft.stored_adapters import stored_tensor_names as stored_tensor_names
else:
    __getattr__, __dir__ = lazy_exports(__name__)
