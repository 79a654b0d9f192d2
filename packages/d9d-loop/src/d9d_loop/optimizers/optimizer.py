"""Optimizer configurations. Other optimizers are passed to `Trainer(optimizer=)` as an `OptimizerProvider`."""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple, Self, TypeAlias, final

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt
from pydantic import model_validator as validator

from d9d_dist import UserError
from d9d_dist.errors import shorten
from d9d_loop import optimizers
from d9d_loop.section import Section, default_kind

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from d9d_dist.values.parameter_role import ParameterRole


class Member(NamedTuple):
    """Trainable parameter of a model, with its canonical name, its role, and the number of layers above its own."""

    name: str
    parameter: "Tensor"
    role: "ParameterRole"
    depth: int = 0


OptimizerProvider: TypeAlias = Callable[["nn.Module"], "Optimizer"]
"""Function that builds an optimizer of the trainable parameters of a materialized, parallelized model."""


_Decay = Annotated[float, Field(ge=0, lt=1)]
_RATE = "Peak learning rate; the schedule multiplies it."
_DECAY = "Weight decay of the parameters that `decays` selects."


class GroupConfig(Section):
    """Overrides for the parameters that match a pattern. The first group that matches a parameter applies."""

    pattern: str = Field(default="", description="Regular expression, searched in parameter names; '' matches all.")
    of: Literal["any", "matrices", "vectors"] = Field(
        default="any",
        description="Restrict the group to matrices, or to vectors: all other parameters, such as norms, biases and "
        "filters of convolutions.",
    )
    learning_rate: PositiveFloat | None = Field(
        default=None, description="Peak learning rate of the group; null: use the optimizer's value."
    )
    weight_decay: NonNegativeFloat | None = Field(
        default=None, description="Weight decay of the group, applied to vectors too; null: use the optimizer's value."
    )
    optimizer: "OptimizerConfig | None" = Field(default=None, description="Another optimizer for the group.")

    @validator(mode="after")
    def _check(self) -> Self:
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise UserError(
                f"pattern = {self.pattern!r} is not a regular expression: {error}. Escape literal characters with \\."
            ) from None
        if self.optimizer is not None and (self.learning_rate is not None or self.weight_decay is not None):
            raise UserError("the group has an optimizer; set learning_rate and weight_decay in this optimizer instead.")
        return self

    def chooses(self, member: Member) -> bool:
        """Return True if the group matches the parameter."""
        fits = self.of == "any" or (self.of == "matrices") == (member.role == "matrix")
        return fits and re.search(self.pattern, member.name) is not None


class OptimizerSettings(Section, ABC):
    """Base class of the optimizer configurations: common options, and assignment of parameters to groups."""

    learning_rate: PositiveFloat = Field(description=_RATE)
    weight_decay: NonNegativeFloat = Field(description=_DECAY)
    decays: Literal["matrices", "all"] = Field(
        default="matrices",
        description="Parameters with weight decay: all, or only matrices (including embeddings and filters of "
        "convolutions, excluding norms, biases, and what the model names in `no_weight_decay`).",
    )
    layer_decay: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="Factor of the learning rate for each layer below the head, as in BEiT and timm; 1: equal rates.",
    )
    groups: tuple[GroupConfig, ...] = Field(
        default=(), description="Parameters with another learning rate, decay or optimizer; the first match applies."
    )

    only_matrices: ClassVar[bool] = False
    """True if the optimizer can only update matrices."""

    @final
    def build(
        self,
        model: "nn.Module",
        *,
        whole: bool = True,
        roles: "Mapping[str, ParameterRole] | None" = None,
        depths: Mapping[str, int] | None = None,
    ) -> "Optimizer":
        """Build the optimizer; a `JoinedOptimizer` if groups use other optimizers.

        Each parameter that requires gradients is in exactly one parameter group.

        Args:
            model: Model or pipeline stage, materialized and parallelized.
            whole: True if `model` is the whole model, so that every group must match a parameter. Pass False for a
                pipeline stage, and build the optimizer of the whole model, which may be on `meta`, as a check.
            roles: Roles of the parameters of the whole model before it was parallelized, by canonical name; by default
                those of `model`.
            depths: `layer_depths` of the whole model; by default those of `model`.

        Raises:
            UserError: If `whole` is True and a group matches no parameter, or an optimizer does not support a
                parameter.
        """
        members = _trainable(model, roles or {}, layer_depths(model) if depths is None else depths)
        first, *others = self._optimizers(members, whole=whole)
        return optimizers.JoinedOptimizer([first, *others]) if others else first

    @abstractmethod
    def make(self, groups: list[dict[str, Any]]) -> "Optimizer":
        """Construct the optimizer of groups with `params` (pairs of name and parameter), `lr` and `weight_decay`."""

    @final
    def _optimizers(self, members: list[Member], *, whole: bool) -> "list[Optimizer]":
        """Build this optimizer and the optimizers of its groups; omit optimizers without parameters.

        If no optimizer has a parameter, this optimizer is built with an empty group.
        """
        rest, *matched = assign(members, self.groups, whole=whole)
        own = self._groups(rest)
        others: list[Optimizer] = []
        for group, chosen in zip(self.groups, matched, strict=True):
            if group.optimizer is None:
                own += self._groups(chosen, learning_rate=group.learning_rate, weight_decay=group.weight_decay)
            elif chosen:
                others += group.optimizer._optimizers(chosen, whole=whole)
        # torch optimizers require a group, even if a pipeline stage has no trainable parameter.
        filled = [group for group in own if group["params"]] or ([] if others else own[:1])
        return [*([self.make(filled)] if filled else []), *others]

    def _groups(
        self, members: list[Member], *, learning_rate: float | None = None, weight_decay: float | None = None
    ) -> list[dict[str, Any]]:
        """Return parameter groups for each learning rate: parameters with weight decay, and parameters without.

        The highest rate comes first. An override of the weight decay also applies to vectors.
        """
        if self.only_matrices and (wrong := [each for each in members if each.role != "matrix"]):
            name, shown = type(self).__name__, shorten(f"{each.name} {list(each.parameter.shape)}" for each in wrong)
            raise UserError(
                f"{name.removesuffix('Config')} updates matrices, but got {shown}, which are not matrices. Use another "
                'optimizer for them: [[optimizer.groups]] with of = "vectors" and optimizer = { kind = "adamw" }.'
            )
        decays_all = self.decays == "all" or weight_decay is not None
        lr = self.learning_rate if learning_rate is None else learning_rate
        decay = self.weight_decay if weight_decay is None else weight_decay
        chosen: dict[tuple[int, bool], list[tuple[str, Tensor]]] = {(0, False): []}
        for name, parameter, role, depth in members:
            key = 0 if self.layer_decay == 1 else depth, not decays_all and role == "vector"
            chosen.setdefault(key, []).append((name, parameter))
        return [
            {"params": params, "lr": lr * self.layer_decay**depth, "weight_decay": 0.0 if is_plain else decay}
            for (depth, is_plain), params in sorted(chosen.items(), key=lambda each: each[0])
        ]


class _AdamSettings(OptimizerSettings, ABC):
    learning_rate: PositiveFloat = Field(default=1e-3, description=_RATE)
    weight_decay: NonNegativeFloat = Field(default=0.1, description=_DECAY)
    betas: tuple[_Decay, _Decay] = Field(
        default=(0.9, 0.95), description="Decay rates of the moving averages of gradients and squared gradients."
    )
    eps: PositiveFloat = Field(default=1e-8, description="Added to the denominator, for numerical stability.")


@final
class AdamWConfig(_AdamSettings):
    """AdamW (Loshchilov, Hutter: "Decoupled weight decay regularization", arXiv:1711.05101)."""

    kind: Literal["adamw"] = "adamw"

    def make(self, groups: list[dict[str, Any]]) -> "Optimizer":
        """Construct the AdamW optimizer, with torch's fused implementation."""
        return optimizers.LocalAdamW(groups, betas=self.betas, eps=self.eps, **_kernels(groups))


@final
class AdamConfig(_AdamSettings):
    """Adam (Kingma, Ba, arXiv:1412.6980); its weight decay is an L2 penalty."""

    kind: Literal["adam"] = "adam"
    weight_decay: NonNegativeFloat = Field(
        default=0.0, description="L2 penalty of the parameters that `decays` selects."
    )

    def make(self, groups: list[dict[str, Any]]) -> "Optimizer":
        """Construct the Adam optimizer, with torch's fused implementation."""
        return optimizers.LocalAdam(groups, betas=self.betas, eps=self.eps, **_kernels(groups))


@final
class SGDConfig(OptimizerSettings):
    """Stochastic gradient descent, with optional momentum."""

    kind: Literal["sgd"] = "sgd"
    learning_rate: PositiveFloat = Field(default=1e-2, description=_RATE)
    weight_decay: NonNegativeFloat = Field(
        default=0.0, description="L2 penalty of the parameters that `decays` selects."
    )
    momentum: _Decay = Field(default=0.0, description="Decay of the momentum buffer; 0 keeps no buffer.")
    nesterov: bool = Field(default=False, description="Use Nesterov momentum; needs momentum above 0.")

    @validator(mode="after")
    def _check(self) -> Self:
        if self.nesterov and self.momentum == 0:
            raise UserError(
                "nesterov = true, but momentum = 0; expected momentum above 0. Set it, or nesterov = false."
            )
        return self

    def make(self, groups: list[dict[str, Any]]) -> "Optimizer":
        """Construct an SGD optimizer."""
        return optimizers.LocalSGD(groups, momentum=self.momentum, nesterov=self.nesterov)


@final
class MuonConfig(OptimizerSettings):
    """Muon for whole matrices (arXiv:2502.16982). Vectors, embeddings and heads need a group with another optimizer."""

    only_matrices: ClassVar[bool] = True
    kind: Literal["muon"] = "muon"
    learning_rate: PositiveFloat = Field(default=1e-3, description=_RATE)
    weight_decay: NonNegativeFloat = Field(default=0.1, description="Weight decay of matrices.")
    momentum: _Decay = Field(default=0.95, description="Decay of the momentum buffer.")
    nesterov: bool = Field(default=True, description="Use Nesterov momentum.")
    num_iterations: PositiveInt = Field(default=5, description="Number of Newton-Schulz iterations.")
    scale: Literal["match_rms_adamw", "original"] = Field(
        default="match_rms_adamw",
        description="Scale of updates. match_rms_adamw matches the RMS of AdamW's updates, so AdamW's learning rates "
        "apply; original follows the original Muon.",
    )

    def make(self, groups: list[dict[str, Any]]) -> "Optimizer":
        """Construct a Muon optimizer."""
        return optimizers.Muon(
            groups, momentum=self.momentum, nesterov=self.nesterov, num_iterations=self.num_iterations, scale=self.scale
        )


@final
class LionConfig(OptimizerSettings):
    """Lion (arXiv:2302.06675). Use 3 to 10 times AdamW's weight decay, and a learning rate lower by the same factor."""

    kind: Literal["lion"] = "lion"
    learning_rate: PositiveFloat = Field(default=1e-4, description=_RATE)
    weight_decay: NonNegativeFloat = Field(default=1.0, description=_DECAY)
    betas: tuple[_Decay, _Decay] = Field(
        default=(0.9, 0.99), description="Weight of the momentum average in the update, and decay rate of this average."
    )

    def make(self, groups: list[dict[str, Any]]) -> "Optimizer":
        """Construct a Lion optimizer."""
        return optimizers.Lion(groups, betas=self.betas)


@final
class ScheduleFreeAdamWConfig(OptimizerSettings):
    """Schedule-Free AdamW (arXiv:2405.15682), an average of iterates. Use warm-up, then a constant learning rate."""

    kind: Literal["schedule_free_adamw"] = "schedule_free_adamw"
    learning_rate: PositiveFloat = Field(default=2.5e-3, description=_RATE)
    weight_decay: NonNegativeFloat = Field(default=0.1, description=_DECAY)
    betas: tuple[Annotated[float, Field(gt=0, lt=1)], _Decay] = Field(
        default=(0.9, 0.999),
        description="Interpolation factor between iterate and average, and decay rate of the second moment.",
    )
    eps: PositiveFloat = Field(default=1e-8, description="Added to the denominator, for numerical stability.")

    def make(self, groups: list[dict[str, Any]]) -> "Optimizer":
        """Construct a Schedule-Free AdamW optimizer."""
        return optimizers.ScheduleFreeAdamW(groups, betas=self.betas, eps=self.eps)


@final
class StochasticAdamWConfig(_AdamSettings):
    """AdamW for bfloat16 parameters with stochastic rounding, which needs no float32 copy of the parameters."""

    kind: Literal["stochastic_adamw"] = "stochastic_adamw"
    averages: Literal["float32", "bfloat16"] = Field(
        default="float32",
        description="Dtype of the averages; bfloat16 halves their memory and is rounded stochastically.",
    )
    seed: int = Field(default=0, ge=0, description="Seed of stochastic rounding.")

    def make(self, groups: list[dict[str, Any]]) -> "Optimizer":
        """Construct the AdamW optimizer with stochastic rounding."""
        import torch  # noqa: PLC0415 - configurations need no torch

        dtype = torch.bfloat16 if self.averages == "bfloat16" else torch.float32
        return optimizers.StochasticAdamW(groups, betas=self.betas, eps=self.eps, average_dtype=dtype, seed=self.seed)


OptimizerConfig: TypeAlias = Annotated[
    Annotated[
        AdamWConfig
        | AdamConfig
        | SGDConfig
        | MuonConfig
        | LionConfig
        | ScheduleFreeAdamWConfig
        | StochasticAdamWConfig,
        Field(discriminator="kind"),
    ],
    default_kind("adamw"),
]
"""Any optimizer configuration, selected by `kind`; the default is "adamw"."""

GroupConfig.model_rebuild()


def _kernels(groups: list[dict[str, Any]]) -> dict[str, bool]:
    """Return the argument that selects torch's implementation: fused, except for complex parameters and on `meta`.

    The fused implementation reads and writes each value once: a step on CPUs takes a third of the time. It can skip a
    bad step on the device, without host-device synchronization. It ignores strides on CPUs, so other parameters than
    contiguous ones need the separate operations.
    """
    from d9d_dist import local_tensor  # noqa: PLC0415 - imports torch

    parameters = [local_tensor(parameter) for group in groups for _, parameter in group["params"]]
    is_fused = all(
        each.is_floating_point() and each.is_contiguous() and each.device.type != "meta" for each in parameters
    )
    return {"fused": True} if is_fused else {"foreach": True}


def layer_depths(model: "nn.Module") -> dict[str, int]:
    """Return the number of layers above each parameter's own, by canonical name.

    Layers are the blocks of numbered modules, what is before them, and what is after them, such as a final norm and the
    head. A model of timm groups its layers itself.
    """
    from d9d_dist import canonical_name  # noqa: PLC0415 - imports torch

    layers, layer, block = dict[str, int](), 0, None
    if hasattr(model, "group_matcher"):
        from timm.models import group_parameters  # noqa: PLC0415 - the model is one of timm

        timm_model: Any = model
        layers = group_parameters(model, timm_model.group_matcher(coarse=False), reverse=True)
    for name in () if layers else map(canonical_name, dict(model.named_parameters())):
        found = re.match(r"(.*?\.)?\d+(?=\.)", name)
        layer += bool(layers) and block != (found and found.group())
        block = found and found.group()
        layers[name] = layer
    top = max(layers.values(), default=0)
    return {name: top - layer for name, layer in layers.items()}


def _trainable(model: "nn.Module", roles: "Mapping[str, ParameterRole]", depths: Mapping[str, int]) -> list[Member]:
    from d9d_dist import canonical_name, parameter_roles  # noqa: PLC0415 - imports torch

    own = parameter_roles(model)
    # The stages of a pipeline name their parameters as the whole model does, unlike their modules.
    owners = {
        id(parameter): own[canonical_name(f"{prefix}.{name}".lstrip("."))]
        for prefix, module in model.named_modules()
        for name, parameter in module.named_parameters(recurse=False)
    }
    named = ((canonical_name(name), each) for name, each in model.named_parameters() if each.requires_grad)
    return [
        Member(name, each, roles[name] if name in roles else owners[id(each)], depths.get(name, 0))
        for name, each in named
    ]


def optimizer_kinds(config: OptimizerSettings, model: "nn.Module") -> dict[str, str]:
    """Return the kind of optimizer that updates each trainable parameter, by canonical name."""
    return _kinds(config, _trainable(model, {}, {}))


def _kinds(config: Any, members: list[Member]) -> dict[str, str]:
    rest, *matched = assign(members, config.groups, whole=False)
    kinds = {member.name: config.kind for member in rest}
    for group, chosen in zip(config.groups, matched, strict=True):
        own = {member.name: config.kind for member in chosen}
        kinds |= own if group.optimizer is None else _kinds(group.optimizer, chosen)
    return kinds


def assign(members: list[Member], groups: Sequence[GroupConfig], *, whole: bool = True) -> list[list[Member]]:
    """Assign each parameter to the first group that matches it.

    Return the parameters that match no group, then the parameters of each group in order. With `whole`, a
    group without parameters raises `UserError`; a pipeline stage may have none.
    """
    found: list[list[Member]] = [[] for _ in (None, *groups)]
    for member in members:
        chosen = (number for number, each in enumerate(groups, 1) if each.chooses(member))
        found[next(chosen, 0)].append(member)
    for number, group in enumerate(groups, 1):
        if whole and not found[number]:
            raise UserError(_explain(members, group))
    return found


def _explain(members: list[Member], group: GroupConfig) -> str:
    shown = f"the optimizer's group with pattern = {group.pattern!r}" + ("" if group.of == "any" else f" of {group.of}")
    if any(map(group.chooses, members)):
        return (
            f"{shown} gets no parameter, because earlier groups match all of them; "
            "expected at least one. Move it before them, or remove it."
        )
    names = [each.name for each in members]
    return (
        f"{shown} matches no trainable parameter; expected at least one of "
        f"{shorten(names)}. Correct the pattern, which is searched in these names, or remove the "
        "group."
    )
