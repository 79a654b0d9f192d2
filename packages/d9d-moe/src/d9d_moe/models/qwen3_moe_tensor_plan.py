"""How a Qwen3-MoE model is tensor parallel: its attention is split; experts are whole, and see a part of the tokens."""

from d9d_dist import TensorStyle
from d9d_modules import qwen3_attention_tensor_plan
from d9d_moe.models.qwen3_moe import Qwen3MoeParams


def qwen3_moe_tensor_plan(params: Qwen3MoeParams) -> dict[str, TensorStyle]:
    """The plan for `parallelize_tensor` of a `Qwen3MoeForCausalLM`.

    Heads and vocabulary are split, and the sequence between the blocks (L / tp tokens on each rank). Feed-forward
    blocks keep whole parameters and compute on their part of the sequence.

    Args:
        params: The sizes of the model.
    """
    return qwen3_attention_tensor_plan(params.decoder)
