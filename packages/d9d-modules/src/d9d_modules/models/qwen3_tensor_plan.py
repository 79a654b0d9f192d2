"""How a Qwen3 model is tensor parallel: the plans of `decoder_tensor_plan` under the family's name."""

from d9d_dist import TensorStyle
from d9d_modules.models.decoder_tensor_plan import decoder_attention_tensor_plan, decoder_tensor_plan
from d9d_modules.models.qwen3 import Qwen3Params


def qwen3_tensor_plan(params: Qwen3Params) -> dict[str, TensorStyle]:
    """The plan for `parallelize_tensor` of a `Qwen3ForCausalLM`; see `decoder_tensor_plan`.

    Args:
        params: The sizes of the model.
    """
    return decoder_tensor_plan(params)


def qwen3_attention_tensor_plan(params: Qwen3Params) -> dict[str, TensorStyle]:
    """The plan without feed-forward blocks, which compute on their part of the sequence with whole parameters.

    Args:
        params: The sizes of the model.
    """
    return decoder_attention_tensor_plan(params)
