"""Tensor-parallel styles of submodules, for plans of `parallelize_tensor`.

A style defines the placements of parameters on the mesh axis, and the conversion of activations on entry and exit.
Between modules, activations are plain tensors: equal on all ranks (`Replicate()`) or split on a dim (`Shard(dim)`). So
a module's own code needs no changes.

"Megatron-LM", arXiv:1909.08053 (column and row); "Reducing Activation Recomputation in Large Transformer Models",
arXiv:2205.05198 (sequence parallel).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, final

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard

from d9d_dist.collectives.differentiable import copy_to_axis, gather_from_axis, reduce_from_axis, reduce_scatter_to_axis
from d9d_dist.errors import UserError
from d9d_dist.tensor_parallel.vocab import (
    HasTokenLoss,
    HasVocabParallelForm,
    TokenLoss,
    VocabParallelCrossEntropy,
    embed_vocab_shard,
    token_cross_entropy,
)

REPLICATE = Replicate()
"""Placement of an activation that is equal on all ranks."""

FEATURES = Shard(-1)
"""Placement of an activation whose last dim is split."""


_LINEAR = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.PReLU)


class TensorStyle:
    """Tensor-parallel behavior of a submodule. Base class for custom styles.

    Attributes:
        has_partial_gradients: True if ranks compute different parts of the gradients of replicated parameters. Examples
            are modules that compute on a part of the sequence or on some of the heads. Applies to the submodule and to
            its descendants that the plan does not name.
    """

    has_partial_gradients: ClassVar[bool] = True

    def placements(self) -> Mapping[str, Placement]:
        """Return the placements of the submodule's own parameters on the mesh axis, by name; others are replicated."""
        return {}

    @property
    def block(self) -> int:
        """Number of consecutive elements of a split dim that must stay on one rank."""
        return 1

    def check(self, module: nn.Module) -> None:
        """Raise `UserError` if the style does not support the submodule, before any change."""

    def prepare(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """Change the submodule in place, beyond the conversion of its activations."""

    def forward(self, module: nn.Module, mesh: DeviceMesh, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Replace the submodule's forward, `inner`. During the call, parameters are this rank's shards."""
        return inner(*args, **kwargs)


@final
@dataclass(frozen=True)
class TensorRegion(TensorStyle):
    """Entry of a region whose column-parallel layers share one input, such as attention or a gated MLP.

    The first positional argument becomes a whole tensor once for all layers; in backward its partial gradients are
    summed once. Replicated parameters inside the region, such as a QK norm's, have partial gradients. After the
    region's row-parallel layer, activations are whole again. If a norm follows that layer in the region, give the norm
    the style `Replicated()`, or `SequenceParallel()` if the output is split.

    Attributes:
        input: Placement of the argument: equal on all ranks (backward all-reduces) or split on a dim (forward
            all-gathers, backward reduce-scatters).
    """

    input: Placement = REPLICATE

    def forward(self, module: nn.Module, mesh: DeviceMesh, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """See `TensorStyle.forward`."""
        return inner(_redistribute_input(_first_arg(args, self, module), self.input, mesh), *args[1:], **kwargs)


@final
@dataclass(frozen=True)
class ColumnParallel(TensorStyle):
    """Linear layer with split outputs: weight [out, in] and bias [out] are `Shard(0)`.

    Attributes:
        input: Placement of the input: equal on all ranks, or split on a dim. `None` inside a `TensorRegion`, which has
            already converted the input.
        output: Placement of the output: this rank's features, or all features on every rank (`Replicate()`,
            all-gathered).
        head_dim: Number of outputs per attention head. Heads are not split between ranks.
    """

    input: Placement | None = REPLICATE
    output: Placement = FEATURES
    head_dim: int = 1

    @property
    def block(self) -> int:
        """See `TensorStyle.block`."""
        return self.head_dim

    def placements(self) -> Mapping[str, Placement]:
        """See `TensorStyle.placements`."""
        return {"weight": Shard(0), "bias": Shard(0)}

    def check(self, module: nn.Module) -> None:
        """See `TensorStyle.check`."""
        _check_linear(self, module)

    def forward(self, module: nn.Module, mesh: DeviceMesh, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """See `TensorStyle.forward`."""
        features = inner(_redistribute_input(_first_arg(args, self, module), self.input, mesh), *args[1:], **kwargs)
        return gather_from_axis(features, mesh, dim=-1, gradient="equal") if self.output == REPLICATE else features


@final
@dataclass(frozen=True)
class RowParallel(TensorStyle):
    """Linear layer with split inputs: weight [out, in] is `Shard(1)`. The ranks' outputs are summed.

    Only the first rank adds the bias, so that the sum includes it once.

    Attributes:
        output: Placement of the output: the sum on all ranks (all-reduced), or one part per rank (`Shard(dim)`,
            reduce-scattered).
    """

    output: Placement = REPLICATE

    def placements(self) -> Mapping[str, Placement]:
        """See `TensorStyle.placements`."""
        return {"weight": Shard(1)}

    def check(self, module: nn.Module) -> None:
        """See `TensorStyle.check`."""
        _check_linear(self, module)

    def forward(self, module: nn.Module, mesh: DeviceMesh, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """See `TensorStyle.forward`."""
        bias = module._parameters.get("bias")
        if bias is not None:
            module._parameters["bias"] = bias * float(mesh.get_local_rank() == 0)  # ty: ignore[invalid-assignment]
        return _redistribute_output(inner(*args, **kwargs), self.output, mesh)


@final
@dataclass(frozen=True)
class SequenceParallel(TensorStyle):
    """Module that computes on this rank's part of an activation, with replicated parameters. No collectives.

    For norms and other modules that act on single tokens, between a layer with output `Shard(1)` and a layer with input
    `Shard(1)`.
    """


@final
@dataclass(frozen=True)
class Replicated(TensorStyle):
    """Module that computes the same on every rank; the default style outside of named submodules.

    Use it in a plan to exclude a submodule from the style of an outer module.
    """

    has_partial_gradients: ClassVar[bool] = False


@final
@dataclass(frozen=True)
class VocabParallelEmbedding(TensorStyle):
    """`torch.nn.Embedding` with split rows: weight [vocabulary, D] is `Shard(0)`.

    Each rank looks up its own ids and returns zeros for all other ids; the ranks' outputs are summed.

    Attributes:
        output: Placement of the output: whole on all ranks, or one part per rank (`Shard(1)`: part of the sequence).
    """

    output: Placement = REPLICATE

    def placements(self) -> Mapping[str, Placement]:
        """See `TensorStyle.placements`."""
        return {"weight": Shard(0)}

    def check(self, module: nn.Module) -> None:
        """See `TensorStyle.check`."""
        if not isinstance(module, nn.Embedding) or type(module).forward is not nn.Embedding.forward:
            raise UserError(
                f"VocabParallelEmbedding got a {type(module).__name__}; expected a torch.nn.Embedding with torch's own "
                "forward, because the lookup is replaced. Put other computations into a wrapper module."
            )
        options = ("padding_idx", "max_norm", "scale_grad_by_freq", "sparse")
        for name in options:
            value = getattr(module, name)
            if value is not None and value is not False:
                raise UserError(
                    f"VocabParallelEmbedding got an embedding with {name} = {value}; expected it to be unset."
                )

    def forward(self, module: nn.Module, mesh: DeviceMesh, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """See `TensorStyle.forward`."""
        ids = _first_arg(args, self, module)
        weight_VD = module.weight
        assert isinstance(weight_VD, Tensor)
        return _redistribute_output(embed_vocab_shard(ids, len(weight_VD), mesh, inner), self.output, mesh)


@final
@dataclass(frozen=True)
class VocabParallelHead(TensorStyle):
    """Language-model head with split rows: weight [vocabulary, D] is `Shard(0)`.

    The head computes its losses by its attribute `token_loss` (`HasTokenLoss`) from this rank's logits, so no rank
    holds all logits. Without labels (`labels=` or the second argument) the logits are all-gathered.

    Attributes:
        input: Placement of the hidden states: equal on all ranks, or split on a dim.
        token_loss: Function that returns the loss over a vocabulary that is split on a mesh axis. `None` selects the
            vocab-parallel form of the head's own loss (`HasVocabParallelForm`), or of `token_cross_entropy`. Required
            for heads with any other loss.
    """

    input: Placement = REPLICATE
    token_loss: Callable[[DeviceMesh], TokenLoss] | None = None

    def placements(self) -> Mapping[str, Placement]:
        """See `TensorStyle.placements`."""
        return {"weight": Shard(0), "bias": Shard(0)}

    def check(self, module: nn.Module) -> None:
        """See `TensorStyle.check`."""
        if not isinstance(module, HasTokenLoss):
            raise UserError(
                f"VocabParallelHead got a {type(module).__name__}; expected a module whose attribute token_loss "
                "computes the losses (d9d_dist.HasTokenLoss). For a plain linear layer use "
                "ColumnParallel(output=Replicate())."
            )
        present = module.token_loss
        if self.token_loss is None and _vocab_parallel_form(present) is None:
            raise UserError(
                f"VocabParallelHead got a {type(module).__name__} whose token_loss is {present!r}; expected "
                "token_cross_entropy, or a loss with a method vocab_parallel (d9d_dist.HasVocabParallelForm). Pass the "
                "vocabulary-parallel form of your loss: VocabParallelHead(token_loss=...)."
            )

    def prepare(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """See `TensorStyle.prepare`."""
        assert isinstance(module, HasTokenLoss)
        make_loss = self.token_loss or _vocab_parallel_form(module.token_loss)
        assert make_loss is not None, "check raises an error in this case"
        module.token_loss = make_loss(mesh)

    def forward(self, module: nn.Module, mesh: DeviceMesh, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """See `TensorStyle.forward`."""
        outputs = inner(_redistribute_input(_first_arg(args, self, module), self.input, mesh), *args[1:], **kwargs)
        labels = args[1] if len(args) > 1 else kwargs.get("labels")
        return gather_from_axis(outputs, mesh, dim=-1, gradient="equal") if labels is None else outputs


def _vocab_parallel_form(loss: TokenLoss) -> Callable[[DeviceMesh], TokenLoss] | None:
    if loss is token_cross_entropy:
        return VocabParallelCrossEntropy
    return loss.vocab_parallel if isinstance(loss, HasVocabParallelForm) else None


def _check_linear(style: TensorStyle, module: nn.Module) -> None:
    """Raise `UserError` for a layer of torch whose weight cannot be split, such as a grouped convolution."""
    groups = getattr(module, "groups", 1)
    is_own = type(module).forward.__module__.partition(".")[0] != "torch"
    is_linear = is_own or isinstance(module, _LINEAR) or module._parameters.get("weight") is None
    if not is_linear or (isinstance(groups, int) and groups > 1 and not is_own):
        raise UserError(
            f"{type(style).__name__} got {module}; expected a linear layer, a convolution without groups, or a module "
            "of your own that computes with parts of its weight. Leave it out of the plan."
        )


def _first_arg(args: tuple[Any, ...], style: TensorStyle, module: nn.Module) -> Any:
    if not args:
        raise UserError(
            f"{type(style).__name__}: the {type(module).__name__} was called without positional arguments; expected "
            "the activation as the first one. Pass it by position."
        )
    return args[0]


def _redistribute_input(x: Tensor, layout: Placement | None, mesh: DeviceMesh) -> Tensor:
    """Return the whole activation, whose gradient is partial; `layout` is `None` if `x` is already whole."""
    if layout is None:
        return x
    if isinstance(layout, Shard):
        return gather_from_axis(x, mesh, dim=layout.dim, gradient="partial")
    return copy_to_axis(x, mesh)


def _redistribute_output(x: Tensor, layout: Placement, mesh: DeviceMesh) -> Tensor:
    """Sum an activation over ranks; return the whole sum, or this rank's part if `layout` is a `Shard`."""
    if isinstance(layout, Shard):
        return reduce_scatter_to_axis(x, mesh, dim=layout.dim)
    return reduce_from_axis(x, mesh)
