"""Mixture of experts for PyTorch: routing, dispatch, grouped experts, expert parallelism."""

from typing import TYPE_CHECKING

from d9d_dist.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from d9d_moe.all_to_all import AllToAllDispatcher as AllToAllDispatcher
    from d9d_moe.deep_ep import DeepEpDispatcher as DeepEpDispatcher
    from d9d_moe.dispatch import Dispatcher as Dispatcher
    from d9d_moe.dispatch import LocalDispatcher as LocalDispatcher
    from d9d_moe.expert_balance import balance_experts as balance_experts
    from d9d_moe.expert_balance import load_statistics as load_statistics
    from d9d_moe.expert_balance import pop_tokens_per_expert as pop_tokens_per_expert
    from d9d_moe.expert_record import record_experts as record_experts
    from d9d_moe.experts import GroupedSwiGLU as GroupedSwiGLU
    from d9d_moe.experts import SharedExperts as SharedExperts
    from d9d_moe.grouped_linear import GroupedLinear as GroupedLinear
    from d9d_moe.grouped_linear import grouped_matmul as grouped_matmul
    from d9d_moe.layer import MoELayer as MoELayer
    from d9d_moe.models.deepseek_v3 import DEEPSEEK_V3 as DEEPSEEK_V3
    from d9d_moe.models.deepseek_v3 import KIMI_K2 as KIMI_K2
    from d9d_moe.models.deepseek_v3 import DeepseekV3ForCausalLM as DeepseekV3ForCausalLM
    from d9d_moe.models.deepseek_v3 import DeepseekV3Params as DeepseekV3Params
    from d9d_moe.models.glm4_moe import GLM4_MOE as GLM4_MOE
    from d9d_moe.models.glm4_moe import Glm4MoeParams as Glm4MoeParams
    from d9d_moe.models.glm4_moe_lite import GLM4_MOE_LITE as GLM4_MOE_LITE
    from d9d_moe.models.gpt_oss import GPT_OSS as GPT_OSS
    from d9d_moe.models.gpt_oss import GptOssParams as GptOssParams
    from d9d_moe.models.qwen3_moe import QWEN3_MOE as QWEN3_MOE
    from d9d_moe.models.qwen3_moe import Qwen3MoeForCausalLM as Qwen3MoeForCausalLM
    from d9d_moe.models.qwen3_moe import Qwen3MoeParams as Qwen3MoeParams
    from d9d_moe.models.qwen3_next import QWEN3_5_MOE as QWEN3_5_MOE
    from d9d_moe.models.qwen3_next import QWEN3_NEXT as QWEN3_NEXT
    from d9d_moe.models.qwen3_next import Qwen3NextParams as Qwen3NextParams
    from d9d_moe.models.qwen3_next import Qwen35MoeParams as Qwen35MoeParams
    from d9d_moe.models.sparse_params import SparseParams as SparseParams
    from d9d_moe.models.sparse_params import sparse_from_hugging_face as sparse_from_hugging_face
    from d9d_moe.moe_parallel import parallelize_moe as parallelize_moe
    from d9d_moe.router import SigmoidRouter as SigmoidRouter
    from d9d_moe.router import TopKRouter as TopKRouter
    from d9d_moe.router_losses import JointBalance as JointBalance
    from d9d_moe.router_losses import RouterLosses as RouterLosses
    from d9d_moe.router_losses import token_records as token_records
else:
    __getattr__, __dir__ = lazy_exports(__name__)
