"""The optimizers that a configuration can name; any other is passed to the Trainer as a function of the model."""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Annotated, Any, Literal, Self, TypeAlias, final

import torch
from pydantic import BeforeValidator, Field, NonNegativeFloat, PositiveFloat, PositiveInt
from pydantic import model_validator as validator
from torch import nn
from torch.optim import Optimizer

from d9d_dist import UserError, canonical_name
from d9d_loop.optimizers import (
    JoinedOptimizer,
    Lion,
    LocalAdam,
    LocalAdamW,
    LocalSGD,
    Muon,
    ScheduleFreeAdamW,
    StochasticAdamW,
)
from d9d_loop.optimizers.assignment import Dims, Named, Selector, assign, is_matrix
from d9d_loop.optimizers.muon import Scale
from d9d_loop.section import Section

OptimizerProvider = Callable[[nn.Module], Optimizer]
"""Builds an optimizer over the trainable parameters of a materialised, parallelised model."""


_Decay = Annotated[float, Field(ge=0, lt=1)]


class GroupConfig(Section):
    """Parameters that are treated otherwise than the rest. A parameter belongs to the first group that matches it."""

    pattern: str = Field("", description="Regular expression, searched in names of parameters; '' is found in all.")
    of: Dims = Field("any", description="Of those, which: vectors are norms, biases and whatever else is no matrix.")
    learning_rate: PositiveFloat | None = Field(None, description="Their peak learning rate; null is the optimizer's.")
    weight_decay: NonNegativeFloat | None = Field(
        None, description="Their decay, also that of vectors; null is the optimizer's."
    )
    optimizer: "OptimizerConfig | None" = Field(None, description="Another optimizer for them.")

    @validator(mode="after")
    def _check(self) -> Self:
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise UserError(
                f"pattern = {self.pattern!r} is no regular expression: {error}. Escape what it takes literally with \\."
            ) from None
        if self.optimizer is not None and (self.learning_rate is not None or self.weight_decay is not None):
            raise UserError("learning_rate and weight_decay belong into optimizer, where the group has one of its own.")
        return self


class OptimizerSettings(Section, ABC):
    """What all optimizers of a configuration can be told, and how they get their parameters."""

    learning_rate: PositiveFloat = Field(description="The peak learning rate; the schedule multiplies it.")
    weight_decay: NonNegativeFloat = Field(description="Decay of what `decays` says.")
    decays: Literal["matrices", "all"] = Field(
        "matrices",
        description="Which parameters decay: matrices, embeddings too, but no vectors such as norms; or all.",
    )
    groups: tuple[GroupConfig, ...] = Field(
        (), description="Parameters with another learning rate, decay or optimizer; the first that matches counts."
    )

    @final
    def build(self, model: nn.Module, *, whole: bool = True) -> Optimizer:
        """Build it over the parameters that require gradients, each in one group.

        Args:
            model: Materialised and parallelised.
            whole: Whether this is the whole model. A stage of one may lack what a group matches: check the whole model
                with `check` then.

        Raises:
            UserError: If a group of a whole model matches nothing, or a parameter does not suit its optimizer.
        """
        first, *others = self._optimizers(_trainable(model), whole=whole)
        return JoinedOptimizer([first, *others]) if others else first

    @final
    def check(self, model: nn.Module) -> None:
        """Refuse a whole model that it would not fit; `meta` is enough.

        Raises:
            UserError: As `build`.
        """
        self.build(model)

    @abstractmethod
    def make(self, groups: list[dict[str, Any]]) -> Optimizer:
        """Make the optimizer itself.

        Args:
            groups: With `params`, pairs of name and parameter; `weight_decay`; and `lr`.
        """

    @final
    def _optimizers(self, named: Named, *, whole: bool) -> list[Optimizer]:
        """This optimizer, then those of its groups; without those that have no parameter here, unless none has."""
        selectors = [Selector(group.pattern, group.of) for group in self.groups]
        rest, *matched = assign(named, selectors, whole=whole)
        own = self._groups(rest)
        others: list[Optimizer] = []
        for group, members in zip(self.groups, matched, strict=True):
            if group.optimizer is None:
                own += self._groups(members, learning_rate=group.learning_rate, weight_decay=group.weight_decay)
            elif members:
                others += group.optimizer._optimizers(members, whole=whole)
        # A stage of a pipeline may have nothing to train; an optimizer wants a group.
        filled = [group for group in own if group["params"]] or ([] if others else own[:1])
        return [*([self.make(filled)] if filled else []), *others]

    def _groups(
        self, named: Named, *, learning_rate: float | None = None, weight_decay: float | None = None
    ) -> list[dict[str, Any]]:
        """Those that decay, and those that do not."""
        decays_all = self.decays == "all" or weight_decay is not None
        decayed = [(name, p) for name, p in named if decays_all or is_matrix(p)]
        plain = [(name, p) for name, p in named if not (decays_all or is_matrix(p))]
        lr = self.learning_rate if learning_rate is None else learning_rate
        decay = self.weight_decay if weight_decay is None else weight_decay
        return [
            {"params": decayed, "lr": lr, "weight_decay": decay},
            {"params": plain, "lr": lr, "weight_decay": 0.0},
        ]


@final
class AdamWConfig(OptimizerSettings):
    """AdamW (Loshchilov, Hutter: "Decoupled weight decay regularization", arXiv:1711.05101)."""

    kind: Literal["adamw"] = "adamw"
    learning_rate: PositiveFloat = Field(1e-3, description="The peak learning rate; the schedule multiplies it.")
    weight_decay: NonNegativeFloat = Field(0.1, description="Decay of what `decays` says.")
    betas: tuple[_Decay, _Decay] = Field((0.9, 0.95), description="Decay of the first and second moment's averages.")
    eps: PositiveFloat = Field(1e-8, description="Added to the denominator.")

    def make(self, groups: list[dict[str, Any]]) -> Optimizer:
        """Make torch's AdamW."""
        return LocalAdamW(groups, betas=self.betas, eps=self.eps, **_kernels(groups))


@final
class AdamConfig(OptimizerSettings):
    """Adam (Kingma, Ba, arXiv:1412.6980), whose decay is an L2 penalty."""

    kind: Literal["adam"] = "adam"
    learning_rate: PositiveFloat = Field(1e-3, description="The peak learning rate; the schedule multiplies it.")
    weight_decay: NonNegativeFloat = Field(0.0, description="L2 penalty of what `decays` says.")
    betas: tuple[_Decay, _Decay] = Field((0.9, 0.95), description="Decay of the first and second moment's averages.")
    eps: PositiveFloat = Field(1e-8, description="Added to the denominator.")

    def make(self, groups: list[dict[str, Any]]) -> Optimizer:
        """Make torch's Adam."""
        return LocalAdam(groups, betas=self.betas, eps=self.eps, **_kernels(groups))


@final
class SGDConfig(OptimizerSettings):
    """Stochastic gradient descent, with momentum if asked for."""

    kind: Literal["sgd"] = "sgd"
    learning_rate: PositiveFloat = Field(1e-2, description="The peak learning rate; the schedule multiplies it.")
    weight_decay: NonNegativeFloat = Field(0.0, description="L2 penalty of what `decays` says.")
    momentum: _Decay = Field(0.0, description="Factor of the last step's buffer in this step's; 0 keeps no buffer.")
    nesterov: bool = Field(False, description="Whether to look a step ahead; needs momentum.")

    @validator(mode="after")
    def _check(self) -> Self:
        if self.nesterov and self.momentum == 0:
            raise UserError(
                "nesterov = true, but momentum = 0; expected momentum above 0. Set it, or nesterov = false."
            )
        return self

    def make(self, groups: list[dict[str, Any]]) -> Optimizer:
        """Make torch's SGD."""
        return LocalSGD(groups, momentum=self.momentum, nesterov=self.nesterov)


@final
class MuonConfig(OptimizerSettings):
    """Muon on whole matrices (arXiv:2502.16982). Vectors, embeddings and heads need a group with another optimizer."""

    kind: Literal["muon"] = "muon"
    learning_rate: PositiveFloat = Field(1e-3, description="The peak learning rate; the schedule multiplies it.")
    weight_decay: NonNegativeFloat = Field(0.1, description="Decay of matrices.")
    momentum: _Decay = Field(0.95, description="Decay of the momentum's average.")
    nesterov: bool = Field(True, description="Whether to look a step ahead.")
    num_iterations: PositiveInt = Field(5, description="Repetitions of what makes a matrix orthogonal.")
    scale: Scale = Field(
        "match_rms_adamw", description="How large steps are: as AdamW's, whose rates fit then; or as in the original."
    )

    def make(self, groups: list[dict[str, Any]]) -> Optimizer:
        """Make Muon."""
        return Muon(
            groups,
            momentum=self.momentum,
            nesterov=self.nesterov,
            num_iterations=self.num_iterations,
            scale=self.scale,
        )


@final
class LionConfig(OptimizerSettings):
    """Lion (arXiv:2302.06675): rates 3 to 10 times smaller than AdamW's, and decays as much larger."""

    kind: Literal["lion"] = "lion"
    learning_rate: PositiveFloat = Field(1e-4, description="The peak learning rate; the schedule multiplies it.")
    weight_decay: NonNegativeFloat = Field(1.0, description="Decay of what `decays` says.")
    betas: tuple[_Decay, _Decay] = Field((0.9, 0.99), description="Share of the average in the update, and its decay.")

    def make(self, groups: list[dict[str, Any]]) -> Optimizer:
        """Make Lion."""
        return Lion(groups, betas=self.betas)


@final
class ScheduleFreeAdamWConfig(OptimizerSettings):
    """Schedule-Free AdamW (arXiv:2405.15682): an average of iterates; its schedule warms up and then stays."""

    kind: Literal["schedule_free_adamw"] = "schedule_free_adamw"
    learning_rate: PositiveFloat = Field(2.5e-3, description="The peak learning rate; the schedule multiplies it.")
    weight_decay: NonNegativeFloat = Field(0.1, description="Decay of what `decays` says.")
    betas: tuple[Annotated[float, Field(gt=0, lt=1)], _Decay] = Field(
        (0.9, 0.999), description="Share of the average where gradients are taken, and decay of the second moment's."
    )
    eps: PositiveFloat = Field(1e-8, description="Added to the denominator.")

    def make(self, groups: list[dict[str, Any]]) -> Optimizer:
        """Make Schedule-Free AdamW."""
        return ScheduleFreeAdamW(groups, betas=self.betas, eps=self.eps)


@final
class StochasticAdamWConfig(OptimizerSettings):
    """AdamW for bfloat16 parameters, rounded stochastically: no float32 copy of the parameters is needed."""

    kind: Literal["stochastic_adamw"] = "stochastic_adamw"
    learning_rate: PositiveFloat = Field(1e-3, description="The peak learning rate; the schedule multiplies it.")
    weight_decay: NonNegativeFloat = Field(0.1, description="Decay of what `decays` says.")
    betas: tuple[_Decay, _Decay] = Field((0.9, 0.95), description="Decay of the first and second moment's averages.")
    eps: PositiveFloat = Field(1e-8, description="Added to the denominator.")
    averages: Literal["float32", "bfloat16"] = Field(
        "float32", description="How the averages are stored; bfloat16 takes half of it, and is rounded stochastically."
    )
    seed: int = Field(0, ge=0, description="Of what rounding draws.")

    def make(self, groups: list[dict[str, Any]]) -> Optimizer:
        """Make AdamW with stochastic rounding."""
        dtype = torch.bfloat16 if self.averages == "bfloat16" else torch.float32
        return StochasticAdamW(groups, betas=self.betas, eps=self.eps, average_dtype=dtype, seed=self.seed)


def _with_kind(value: Any) -> Any:
    """AdamW is meant where no kind is given."""
    return {"kind": "adamw", **value} if isinstance(value, dict) else value


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
    BeforeValidator(_with_kind),
]
"""Any of them, told apart by `kind`; AdamW where that is left out."""

GroupConfig.model_rebuild()


def _kernels(groups: list[dict[str, Any]]) -> dict[str, bool]:
    """Which of torch's implementations to take: fused on an accelerator, where it can also leave out a bad step."""
    on_cpu = all(parameter.device.type in ("cpu", "meta") for group in groups for _, parameter in group["params"])
    return {"foreach": True} if on_cpu else {"fused": True}


def _trainable(model: nn.Module) -> Named:
    return [(canonical_name(name), p) for name, p in model.named_parameters() if p.requires_grad]
