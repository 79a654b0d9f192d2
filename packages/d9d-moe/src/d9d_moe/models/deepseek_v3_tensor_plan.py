"""How a DeepSeek-V3 model is tensor parallel: heads are split; experts are whole, and see a part of the tokens."""

from d9d_dist import TensorStyle
from d9d_modules import latent_attention_tensor_plan
from d9d_moe.models.deepseek_v3 import DeepseekV3Params
from d9d_moe.models.moe_parallelize import ATTENTION, moe_tensor_plan


def deepseek_v3_tensor_plan(params: DeepseekV3Params, *, pooled_head: bool = False) -> dict[str, TensorStyle]:
    """The plan for `parallelize_tensor` of a DeepSeek-V3 model; see `moe_tensor_plan`.

    Args:
        params: The sizes of the model.
        pooled_head: Whether the model has a head that pools, in place of a language-model head.
    """
    attention = latent_attention_tensor_plan(
        ATTENTION,
        head_dim=params.head_dim,
        rotary_dim=params.rotary_dim,
        value_dim=params.value_dim,
        sequence_parallel=True,
    )
    return moe_tensor_plan(attention, pooled_head=pooled_head)
