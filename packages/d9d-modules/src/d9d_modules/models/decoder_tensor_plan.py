"""Tensor-parallel plan of a decoder: heads, features and vocabulary are sharded, with sequence parallelism."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, final, runtime_checkable

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from d9d_dist import (
    SequenceParallel,
    TensorStyle,
    UserError,
    VocabParallelEmbedding,
    VocabParallelHead,
    gather_from_axis,
)
from d9d_modules.decoder import DecoderLayer
from d9d_modules.lm_head import LanguageModelHead
from d9d_modules.models.decoder_heads import HeadedDecoder
from d9d_modules.models.decoder_model import DecoderModel
from d9d_modules.models.decoder_mtp import MtpLayer
from d9d_modules.sequence_heads import ClassificationHead, EmbeddingHead


@runtime_checkable
class HasTensorPlan(Protocol):
    """Token mixer or feed-forward block that tensor parallelism can shard."""

    def tensor_plan(self, name: str, *, sequence_parallel: bool = False) -> dict[str, TensorStyle]:
        """Return the `parallelize_tensor` plan entries that shard the module.

        `name` is the module's path, such as `layers.*.attention`. If `sequence_parallel`, the module's input and output
        are sharded along the sequence; else replicated.
        """
        ...


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


@final
@dataclass(frozen=True)
class RowParts(TensorStyle):
    """Tensor-parallel style that passes this rank's part of the sequence to a module.

    The first positional argument [B, L, ...], equal on all ranks, is split along dim 1 into [B, L / tp, ...].
    """

    def forward(self, module: nn.Module, mesh: DeviceMesh, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """See `TensorStyle.forward`."""
        return inner(args[0].chunk(mesh.size(), dim=1)[mesh.get_local_rank()], *args[1:], **kwargs)


def decoder_tensor_plan(model: nn.Module) -> dict[str, TensorStyle]:
    """Return the `parallelize_tensor` plan of a decoder or one of its pipeline stages, with this package's heads.

    Between the blocks each rank holds L / tp tokens (sequence parallelism). The tensor-parallel degree must divide L,
    the number of key/value heads, the intermediate size of dense feed-forward blocks and the vocabulary size. Routers,
    experts and shared experts are replicated; they process the rank's tokens.

    Raises:
        UserError: If a token mixer has no `tensor_plan`.
    """
    plan: dict[str, TensorStyle] = {}
    for name, module in model.named_modules():
        match module:
            case HeadedDecoder():
                plan[f"{name}.transform" if name else "transform"] = SequenceParallel()
            case DecoderModel():
                prefix, rows = f"{name}." if name else "", ("embedding_norm", "layers", "norm")
                plan |= {f"{prefix}{part}": SequenceParallel() for part in rows}
                plan[f"{prefix}embedding"] = VocabParallelEmbedding(output=Shard(1))
                plan[f"{prefix}token_mask"] = RowParts()
                plan[f"{prefix}all_losses"] = WholeRows()
            case DecoderLayer():
                plan |= _layer_plan(name, module)
            case MtpLayer():
                plan |= {f"{name}.{part}": SequenceParallel() for part, _ in module.named_children()}
            case LanguageModelHead():
                plan[name] = VocabParallelHead(input=Shard(1))
            case ClassificationHead() | EmbeddingHead():
                plan[name] = WholeRows()
    return plan


def _layer_plan(name: str, layer: DecoderLayer) -> dict[str, TensorStyle]:
    if not isinstance(layer.attention, HasTensorPlan):
        raise UserError(
            f"{name}.attention is a {type(layer.attention).__name__} without tensor_plan; expected a token mixer that "
            "tensor parallelism can shard. Give it the method, or pass a plan."
        )
    plan = layer.attention.tensor_plan(f"{name}.attention", sequence_parallel=True)
    if isinstance(layer.feed_forward, HasTensorPlan):
        plan |= layer.feed_forward.tensor_plan(f"{name}.feed_forward", sequence_parallel=True)
    return plan
