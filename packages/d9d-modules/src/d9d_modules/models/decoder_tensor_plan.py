"""Tensor-parallel plans of decoders: shard heads, features and vocabulary, with sequence parallelism between blocks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from d9d_dist import (
    ColumnParallel,
    RowParallel,
    SequenceParallel,
    TensorRegion,
    TensorStyle,
    VocabParallelEmbedding,
    VocabParallelHead,
    gather_from_axis,
)
from d9d_modules.attention import attention_tensor_plan
from d9d_modules.models.decoder_params import DecoderParams

SEQUENCE = Shard(1)
"""Placement of hidden states [B, L, D] sharded along the sequence."""


@final
@dataclass(frozen=True)
class WholeRows(TensorStyle):
    """Tensor-parallel style of a pooling head: replicated parameters, sequence-sharded input.

    Forward all-gathers the first positional argument [B, L / tp, ...] to whole rows; backward takes this rank's shard
    of the gradient.
    """

    has_partial_gradients: ClassVar[bool] = False

    def forward(self, module: nn.Module, mesh: DeviceMesh, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """See `TensorStyle.forward`."""
        return inner(gather_from_axis(args[0], mesh, dim=1, gradient="equal"), *args[1:], **kwargs)


def decoder_tensor_plan(
    params: DecoderParams, *, lm_heads: Sequence[str] = ("lm_head",), pooled_heads: Sequence[str] = ()
) -> dict[str, TensorStyle]:
    """Return the `parallelize_tensor` plan of a decoder with any heads.

    Between the blocks each rank holds L / tp tokens (sequence parallelism). The tensor-parallel degree must divide L,
    the number of key/value heads, the intermediate size and the vocabulary size.

    Args:
        params: Hyperparameters of the model.
        lm_heads: Module paths of the language-model heads, such as `heads.text` of a `DecoderWithHeads`.
        pooled_heads: Module paths of the pooling heads, such as `head` of a `DecoderForClassification`.
    """
    feed_forward = "backbone.layers.*.feed_forward"
    return {
        **decoder_attention_tensor_plan(params, lm_heads=lm_heads, pooled_heads=pooled_heads),
        feed_forward: TensorRegion(input=SEQUENCE),
        f"{feed_forward}.gate_proj": ColumnParallel(input=None),
        f"{feed_forward}.up_proj": ColumnParallel(input=None),
        f"{feed_forward}.down_proj": RowParallel(output=SEQUENCE),
    }


def decoder_attention_tensor_plan(
    params: DecoderParams, *, lm_heads: Sequence[str] = ("lm_head",), pooled_heads: Sequence[str] = ()
) -> dict[str, TensorStyle]:
    """Return the plan without feed-forward blocks, which then run on L / tp tokens with replicated parameters.

    Args:
        params: Hyperparameters of the model.
        lm_heads: Module paths of the language-model heads.
        pooled_heads: Module paths of the pooling heads.
    """
    return {
        "backbone.embedding": VocabParallelEmbedding(output=SEQUENCE),
        "backbone.layers": SequenceParallel(),
        **attention_tensor_plan("backbone.layers.*.attention", head_dim=params.head_dim, sequence_parallel=True),
        "backbone.norm": SequenceParallel(),
        **{name: VocabParallelHead(input=SEQUENCE) for name in lm_heads},
        **{name: WholeRows() for name in pooled_heads},
    }
