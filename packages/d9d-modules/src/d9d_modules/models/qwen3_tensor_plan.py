"""Tensor-parallel plans of Qwen3: those of `decoder_tensor_plan` under the names of the family."""

from d9d_dist import TensorStyle
from d9d_modules.models.decoder_tensor_plan import decoder_attention_tensor_plan, decoder_tensor_plan
from d9d_modules.models.qwen3 import Qwen3Params


def qwen3_tensor_plan(params: Qwen3Params) -> dict[str, TensorStyle]:
    """Return the `parallelize_tensor` plan of a `Qwen3ForCausalLM`; see `decoder_tensor_plan`.

    Args:
        params: Hyperparameters of the model.
    """
    return decoder_tensor_plan(params)


def qwen3_attention_tensor_plan(params: Qwen3Params) -> dict[str, TensorStyle]:
    """Return the plan without feed-forward blocks, which then run on L / tp tokens with replicated parameters.

    Args:
        params: Hyperparameters of the model.
    """
    return decoder_attention_tensor_plan(params)
