"""Mixture of experts for PyTorch: routing, dispatch, grouped experts."""

from d9d_moe.dispatch import Dispatched, Dispatcher, LocalDispatched, LocalDispatcher
from d9d_moe.experts import GroupedSwiGLU
from d9d_moe.grouped_linear import GroupedLinear, GroupedMatmulBackend, choose_backend, grouped_matmul
from d9d_moe.layer import MoeFeedForward
from d9d_moe.models.qwen3_moe import Qwen3MoeForCausalLM, Qwen3MoeParams
from d9d_moe.models.qwen3_moe_hugging_face import (
    qwen3_moe_from_hugging_face,
    qwen3_moe_hugging_face_config,
    qwen3_moe_params_from_hugging_face,
)
from d9d_moe.models.qwen3_moe_tensor_plan import qwen3_moe_tensor_plan
from d9d_moe.router import Routing, TopKRouter

__all__ = [
    "Dispatched",
    "Dispatcher",
    "GroupedLinear",
    "GroupedMatmulBackend",
    "GroupedSwiGLU",
    "LocalDispatched",
    "LocalDispatcher",
    "MoeFeedForward",
    "Qwen3MoeForCausalLM",
    "Qwen3MoeParams",
    "Routing",
    "TopKRouter",
    "choose_backend",
    "grouped_matmul",
    "qwen3_moe_from_hugging_face",
    "qwen3_moe_hugging_face_config",
    "qwen3_moe_params_from_hugging_face",
    "qwen3_moe_tensor_plan",
]
