"""How a Qwen3 model is tensor parallel: heads, features and vocabulary are split, and the sequence between them."""

from torch.distributed.tensor import Shard

from d9d_dist import (
    ColumnParallel,
    RowParallel,
    SequenceParallel,
    TensorRegion,
    TensorStyle,
    VocabParallelEmbedding,
    VocabParallelHead,
)
from d9d_modules.models.qwen3 import Qwen3Params

SEQUENCE = Shard(1)
"""Hidden states [B, L, D] of which each rank has a part of the sequence."""


def qwen3_tensor_plan(params: Qwen3Params) -> dict[str, TensorStyle]:
    """The plan for `parallelize_tensor` of a `Qwen3ForCausalLM`.

    Between the blocks each rank has L / tp tokens (sequence parallel); the degree divides L, the number of key/value
    heads, the intermediate size and the vocabulary.

    Args:
        params: The sizes of the model.
    """
    feed_forward = "backbone.layers.*.feed_forward"
    return {
        **qwen3_attention_tensor_plan(params),
        feed_forward: TensorRegion(input=SEQUENCE),
        f"{feed_forward}.gate_proj": ColumnParallel(input=None),
        f"{feed_forward}.up_proj": ColumnParallel(input=None),
        f"{feed_forward}.down_proj": RowParallel(output=SEQUENCE),
    }


def qwen3_attention_tensor_plan(params: Qwen3Params) -> dict[str, TensorStyle]:
    """The plan without feed-forward blocks, which compute on their part of the sequence with whole parameters.

    Args:
        params: The sizes of the model.
    """
    attention = "backbone.layers.*.attention"
    heads = ColumnParallel(input=None, head_dim=params.head_dim)
    return {
        "backbone.embedding": VocabParallelEmbedding(output=SEQUENCE),
        "backbone.layers": SequenceParallel(),
        attention: TensorRegion(input=SEQUENCE),
        f"{attention}.q_proj": heads,
        f"{attention}.k_proj": heads,
        f"{attention}.v_proj": heads,
        f"{attention}.o_proj": RowParallel(output=SEQUENCE),
        "backbone.norm": SequenceParallel(),
        "lm_head": VocabParallelHead(input=SEQUENCE),
    }
