"""How a Qwen3-MoE model is tensor parallel: its attention is split; experts are whole, and see a part of the tokens."""

from d9d_dist import TensorStyle
from d9d_modules import attention_tensor_plan
from d9d_moe.models.moe_parallelize import ATTENTION, moe_tensor_plan
from d9d_moe.models.qwen3_moe import Qwen3MoeParams


def qwen3_moe_tensor_plan(params: Qwen3MoeParams, *, pooled_head: bool = False) -> dict[str, TensorStyle]:
    """The plan for `parallelize_tensor` of a Qwen3-MoE model; see `moe_tensor_plan`.

    Args:
        params: The sizes of the model.
        pooled_head: Whether the model has a head that pools, in place of a language-model head.
    """
    attention = attention_tensor_plan(ATTENTION, head_dim=params.decoder.head_dim, sequence_parallel=True)
    return moe_tensor_plan(attention, pooled_head=pooled_head)
