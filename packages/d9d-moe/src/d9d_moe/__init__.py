"""Mixture of experts for PyTorch: routing, dispatch, grouped experts, expert parallelism."""

from typing import TYPE_CHECKING

from d9d_dist.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from d9d_moe.all_to_all import AllToAllDispatcher
    from d9d_moe.deep_ep import DeepEpBuffer, DeepEpDispatcher, deep_ep_buffer
    from d9d_moe.dispatch import CombineHandle, Dispatched, Dispatcher, LocalDispatcher
    from d9d_moe.expert_balance import (
        LoadStatistics,
        balance_experts,
        load_statistics,
        pop_tokens_per_expert,
        update_expert_bias,
        update_global_load,
    )
    from d9d_moe.expert_counts import ExpertCounter
    from d9d_moe.expert_record import record_experts
    from d9d_moe.experts import Experts, GroupedClampedSwiGLU, GroupedSwiGLU, clamped_swiglu
    from d9d_moe.grouped_linear import (
        GROUPED_MATMUL_VARIABLE,
        GroupedLinear,
        GroupedMatmulBackend,
        choose_grouped_matmul,
        grouped_matmul,
    )
    from d9d_moe.joint_balance import JointBalance, token_records
    from d9d_moe.layer import MoELayer
    from d9d_moe.models.deepseek_moe import DeepseekMoeParams
    from d9d_moe.models.deepseek_v3 import (
        DEEPSEEK_V3,
        KIMI_K2,
        DeepseekV3ForCausalLM,
        DeepseekV3Params,
    )
    from d9d_moe.models.experts_hugging_face import ExpertsLayout, experts_from_hugging_face
    from d9d_moe.models.glm4_moe import GLM4_MOE, Glm4MoeParams
    from d9d_moe.models.glm4_moe_lite import GLM4_MOE_LITE
    from d9d_moe.models.gpt_oss import GPT_OSS, GptOssParams
    from d9d_moe.models.qwen3_moe import QWEN3_MOE, Qwen3MoeForCausalLM, Qwen3MoeParams
    from d9d_moe.models.qwen3_next import QWEN3_5_MOE, QWEN3_NEXT, Qwen3NextParams, Qwen35MoeParams, SparseHybridParams
    from d9d_moe.models.sparse_params import SoftmaxRoutedParams, SparseParams, sparse_from_hugging_face
    from d9d_moe.moe_parallel import Dispatch, DispatchName, parallelize_moe
    from d9d_moe.router import ReplayRouter, Router, Routing, SigmoidRouter, TopKRouter
    from d9d_moe.router_losses import (
        BalanceDefinition,
        BalanceScope,
        RouterLosses,
        TokenGroups,
        expert_load,
        token_losses,
    )
    from d9d_moe.shared_experts import SharedExperts
else:
    __getattr__, __dir__ = lazy_exports(__name__)

__all__ = [
    "DEEPSEEK_V3",
    "GLM4_MOE",
    "GLM4_MOE_LITE",
    "GPT_OSS",
    "GROUPED_MATMUL_VARIABLE",
    "KIMI_K2",
    "QWEN3_5_MOE",
    "QWEN3_MOE",
    "QWEN3_NEXT",
    "AllToAllDispatcher",
    "BalanceDefinition",
    "BalanceScope",
    "CombineHandle",
    "DeepEpBuffer",
    "DeepEpDispatcher",
    "DeepseekMoeParams",
    "DeepseekV3ForCausalLM",
    "DeepseekV3Params",
    "Dispatch",
    "DispatchName",
    "Dispatched",
    "Dispatcher",
    "ExpertCounter",
    "Experts",
    "ExpertsLayout",
    "Glm4MoeParams",
    "GptOssParams",
    "GroupedClampedSwiGLU",
    "GroupedLinear",
    "GroupedMatmulBackend",
    "GroupedSwiGLU",
    "JointBalance",
    "LoadStatistics",
    "LocalDispatcher",
    "MoELayer",
    "Qwen3MoeForCausalLM",
    "Qwen3MoeParams",
    "Qwen3NextParams",
    "Qwen35MoeParams",
    "ReplayRouter",
    "Router",
    "RouterLosses",
    "Routing",
    "SharedExperts",
    "SigmoidRouter",
    "SoftmaxRoutedParams",
    "SparseHybridParams",
    "SparseParams",
    "TokenGroups",
    "TopKRouter",
    "balance_experts",
    "choose_grouped_matmul",
    "clamped_swiglu",
    "deep_ep_buffer",
    "expert_load",
    "experts_from_hugging_face",
    "grouped_matmul",
    "load_statistics",
    "parallelize_moe",
    "pop_tokens_per_expert",
    "record_experts",
    "sparse_from_hugging_face",
    "token_losses",
    "token_records",
    "update_expert_bias",
    "update_global_load",
]
