"""What tensor parallelism does to one submodule: the styles that a plan for `parallelize_tensor` is made of.

A style knows how parameters are placed on the mesh axis, and what happens to the activation on the way in and out.
Between modules activations are plain tensors, either equal on all ranks (`Replicate()`) or split on a dim
(`Shard(dim)`), so a module's own code needs no change.

"Megatron-LM", arXiv:1909.08053 (column and row); "Reducing Activation Recomputation in Large Transformer Models",
arXiv:2205.05198 (sequence parallel).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, final

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard

from d9d_dist.differentiable import enter_partial, gather_shards, scatter_partial, sum_partial
from d9d_dist.errors import UserError
from d9d_dist.vocab_parallel import (
    HasTokenLoss,
    HasVocabParallelForm,
    TokenLoss,
    VocabParallelCrossEntropy,
    embed_vocab_shard,
    token_cross_entropy,
)

REPLICATE = Replicate()
"""An activation that is equal on all ranks."""

FEATURES = Shard(-1)
"""An activation whose last dim is split."""


class TensorStyle:
    """What tensor parallelism does to a submodule; derive from it to make a style of your own.

    Attributes:
        has_partial_gradients: Whether ranks compute different parts of the gradients of replicated parameters. It holds
            for the submodule and for everything below it that the plan does not name: what computes on a part of the
            sequence, or on some of the heads, sees only a part of what its parameters contribute to.
    """

    has_partial_gradients: ClassVar[bool] = True

    def placements(self) -> Mapping[str, Placement]:
        """How the submodule's own parameters are placed on the mesh axis, by name; those left out are replicated."""
        return {}

    @property
    def block(self) -> int:
        """How many consecutive elements of a dim that is split have to stay together."""
        return 1

    def check(self, module: nn.Module) -> None:
        """Look at the submodule before anything is changed.

        Raises:
            UserError: If it is no module that this style can be applied to.
        """

    def prepare(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """Change what is more than a conversion of the submodule's activations, in place."""

    def forward(self, module: nn.Module, mesh: DeviceMesh, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Take the place of the submodule's own forward, `inner`. Its parameters are this rank's parts by then."""
        return inner(*args, **kwargs)


@final
@dataclass(frozen=True)
class TensorRegion(TensorStyle):
    """The entrance of a region whose column-parallel layers share one input, such as attention or a gated MLP.

    The first positional argument becomes a whole tensor, once for all of them; in backward their parts of its gradient
    are added up once. Replicated parameters inside, such as those of a QK norm, have partial gradients. What comes
    after the region's row-parallel layer is whole again: name a norm there `Replicated()`, or `SequenceParallel()`
    where the output is split.

    Attributes:
        input: How the argument arrives: equal on all ranks (backward all-reduces), or split on a dim (all-gathered;
            backward reduce-scatters).
    """

    input: Placement = REPLICATE

    def forward(self, module: nn.Module, mesh: DeviceMesh, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """See `TensorStyle.forward`."""
        return inner(_enter(_first(args, self, module), self.input, mesh), *args[1:], **kwargs)


@final
@dataclass(frozen=True)
class ColumnParallel(TensorStyle):
    """A linear layer whose outputs are split: weight [out, in] and bias [out] are `Shard(0)`.

    Attributes:
        input: How the input arrives: equal on all ranks, or split on a dim. `None` where a `TensorRegion` above has
            brought it in already.
        output: What leaves: this rank's features, or all of them on every rank (`Replicate()`, all-gathered).
        head_dim: How many outputs make up one attention head, which is never cut.
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

    def forward(self, module: nn.Module, mesh: DeviceMesh, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """See `TensorStyle.forward`."""
        features = inner(_enter(_first(args, self, module), self.input, mesh), *args[1:], **kwargs)
        return gather_shards(features, mesh, dim=-1, gradient="equal") if self.output == REPLICATE else features


@final
@dataclass(frozen=True)
class RowParallel(TensorStyle):
    """A linear layer whose inputs are split: weight [out, in] is `Shard(1)`; ranks add up their outputs.

    A bias is added on the first rank alone, so that the sum holds it once.

    Attributes:
        output: What leaves: the sum on all ranks (all-reduced), or a part of it on each (`Shard(dim)`,
            reduce-scattered).
    """

    output: Placement = REPLICATE

    def placements(self) -> Mapping[str, Placement]:
        """See `TensorStyle.placements`."""
        return {"weight": Shard(1)}

    def forward(self, module: nn.Module, mesh: DeviceMesh, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """See `TensorStyle.forward`."""
        bias = module._parameters.get("bias")
        if bias is not None:
            module._parameters["bias"] = bias * float(mesh.get_local_rank() == 0)  # ty: ignore[invalid-assignment]
        return _leave(inner(*args, **kwargs), self.output, mesh)


@final
@dataclass(frozen=True)
class SequenceParallel(TensorStyle):
    """A module that computes on this rank's part of an activation, with replicated parameters; nothing is exchanged.

    For norms and everything else that treats tokens alone, between a layer that gives `Shard(1)` and one that takes it.
    """


@final
@dataclass(frozen=True)
class Replicated(TensorStyle):
    """A module that computes the same on every rank; what a plan does not name is of this style, unless it lies below.

    Name it to take a submodule out of the style of one above it.
    """

    has_partial_gradients: ClassVar[bool] = False


@final
@dataclass(frozen=True)
class VocabParallelEmbedding(TensorStyle):
    """A `torch.nn.Embedding` whose rows are split: weight [vocabulary, D] is `Shard(0)`.

    Each rank looks up the ids that it has, all others count as zero, and ranks add up.

    Attributes:
        output: What leaves: whole vectors on all ranks, or a part on each (`Shard(1)`: of the sequence).
    """

    output: Placement = REPLICATE

    def placements(self) -> Mapping[str, Placement]:
        """See `TensorStyle.placements`."""
        return {"weight": Shard(0)}

    def check(self, module: nn.Module) -> None:
        """See `TensorStyle.check`."""
        if not isinstance(module, nn.Embedding) or type(module).forward is not nn.Embedding.forward:
            raise UserError(
                f"VocabParallelEmbedding got a {type(module).__name__}; expected a torch.nn.Embedding, with its own "
                "forward: the lookup is replaced. Do what else it does in a module around it."
            )
        options = ("padding_idx", "max_norm", "scale_grad_by_freq", "sparse")
        for name in options:
            value = getattr(module, name)
            if value is not None and value is not False:
                raise UserError(f"VocabParallelEmbedding got an embedding with {name} = {value}; expected none.")

    def forward(self, module: nn.Module, mesh: DeviceMesh, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """See `TensorStyle.forward`."""
        ids = _first(args, self, module)
        weight_VD = module.weight
        assert isinstance(weight_VD, Tensor)
        return _leave(embed_vocab_shard(ids, weight_VD, mesh), self.output, mesh)


@final
@dataclass(frozen=True)
class VocabParallelHead(TensorStyle):
    """A language-model head whose rows are split: weight [vocabulary, D] is `Shard(0)`.

    The head computes its losses through its attribute `token_loss` (`HasTokenLoss`), which then works on this rank's
    logits alone: nobody ever holds all of them. Without labels, `labels=` or the second argument, the logits are
    all-gathered.

    Attributes:
        input: How the hidden states arrive: equal on all ranks, or split on a dim.
        token_loss: Makes the loss over a split vocabulary, of the mesh axis. `None` for the form that the head's own
            loss has there (`HasVocabParallelForm`), or cross entropy, where the head computes `token_cross_entropy`; a
            head with another loss needs one.
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
                "computes its losses (d9d_dist.HasTokenLoss). For a plain linear layer use "
                "ColumnParallel(output=Replicate())."
            )
        present = module.token_loss
        if self.token_loss is None and _vocab_parallel_form(present) is None:
            raise UserError(
                f"VocabParallelHead got a {type(module).__name__} whose token_loss is {present!r}; expected "
                "token_cross_entropy, or a loss with a method vocab_parallel (d9d_dist.HasVocabParallelForm). Say how "
                "your loss is computed over a split vocabulary: VocabParallelHead(token_loss=...)."
            )

    def prepare(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """See `TensorStyle.prepare`."""
        assert isinstance(module, HasTokenLoss)
        make_loss = self.token_loss or _vocab_parallel_form(module.token_loss)
        assert make_loss is not None, "check has refused it"
        module.token_loss = make_loss(mesh)

    def forward(self, module: nn.Module, mesh: DeviceMesh, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """See `TensorStyle.forward`."""
        outputs = inner(_enter(_first(args, self, module), self.input, mesh), *args[1:], **kwargs)
        labels = args[1] if len(args) > 1 else kwargs.get("labels")
        return gather_shards(outputs, mesh, dim=-1, gradient="equal") if labels is None else outputs


def _vocab_parallel_form(loss: TokenLoss) -> Callable[[DeviceMesh], TokenLoss] | None:
    if loss is token_cross_entropy:
        return VocabParallelCrossEntropy
    return loss.vocab_parallel if isinstance(loss, HasVocabParallelForm) else None


def _first(args: tuple[Any, ...], style: TensorStyle, module: nn.Module) -> Any:
    if not args:
        raise UserError(
            f"{type(style).__name__} got a call of its {type(module).__name__} without positional arguments; expected "
            "the activation to be the first one. Pass it by position."
        )
    return args[0]


def _enter(x: Tensor, layout: Placement | None, mesh: DeviceMesh) -> Tensor:
    """Make an activation whole for layers that each give a part of its gradient."""
    if layout is None:
        return x
    if isinstance(layout, Shard):
        return gather_shards(x, mesh, dim=layout.dim, gradient="partial")
    return enter_partial(x, mesh)


def _leave(x: Tensor, layout: Placement, mesh: DeviceMesh) -> Tensor:
    """Add up over ranks, and leave all of the sum on each or a part."""
    if isinstance(layout, Shard):
        return scatter_partial(x, mesh, dim=layout.dim)
    return sum_partial(x, mesh)
