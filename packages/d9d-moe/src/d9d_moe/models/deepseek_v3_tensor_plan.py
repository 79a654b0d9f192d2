"""Tensor-parallel plan of DeepSeek-V3: attention and vocabulary are split, experts process a part of the sequence."""

from d9d_dist import TensorStyle
from d9d_modules import latent_attention_tensor_plan
from d9d_moe.models.deepseek_v3 import DeepseekV3Params
from d9d_moe.models.moe_parallelize import ATTENTION, moe_tensor_plan


def deepseek_v3_tensor_plan(params: DeepseekV3Params, *, pooled_head: bool = False) -> dict[str, TensorStyle]:
    """Return the plan of a DeepSeek-V3 model for `parallelize_tensor`; see `moe_tensor_plan`.

    Args:
        params: Parameters of the model.
        pooled_head: True if the model has a pooled head instead of a language-model head.
    """
    attention = latent_attention_tensor_plan(
        ATTENTION,
        head_dim=params.head_dim,
        rotary_dim=params.rotary_dim,
        value_dim=params.value_dim,
        sequence_parallel=True,
    )
    return moe_tensor_plan(attention, pooled_head=pooled_head)
