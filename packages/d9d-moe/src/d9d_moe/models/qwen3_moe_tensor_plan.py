"""Tensor-parallel plan of Qwen3-MoE: attention and vocabulary are split, experts process a part of the sequence."""

from d9d_dist import TensorStyle
from d9d_modules import attention_tensor_plan
from d9d_moe.models.moe_parallelize import ATTENTION, moe_tensor_plan
from d9d_moe.models.qwen3_moe import Qwen3MoeParams


def qwen3_moe_tensor_plan(params: Qwen3MoeParams, *, pooled_head: bool = False) -> dict[str, TensorStyle]:
    """Return the plan of a Qwen3-MoE model for `parallelize_tensor`; see `moe_tensor_plan`.

    Args:
        params: Parameters of the model.
        pooled_head: True if the model has a pooled head instead of a language-model head.
    """
    attention = attention_tensor_plan(ATTENTION, head_dim=params.decoder.head_dim, sequence_parallel=True)
    return moe_tensor_plan(attention, pooled_head=pooled_head)
