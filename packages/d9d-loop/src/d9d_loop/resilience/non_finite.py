"""Search for the origin of a non-finite value, by replay of a bad step: the first rank, module and tensor.

After a reduction, every rank has the same NaN, and modules propagate NaN from input to output. So the step's batches
are run once more. Each rank checks its own module inputs, outputs, parameters, gradients and losses, in the order of
computation. The replay takes a few times as long as the step. Other steps have no overhead.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Literal, TypeAlias, final

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from d9d_dist import DistributedContext, gather_json, local_tensor
from d9d_dist.collectives.consensus import name_ranks

Watch: TypeAlias = Callable[[str, torch.Tensor], None]
"""Function of a name, such as "the loss", and a tensor; it checks the tensor and later its gradient."""

_Phase = Literal["forward", "backward"]


@dataclass(frozen=True, slots=True)
class NonFinite:
    """First non-finite tensor of a step.

    Attributes:
        ranks: Ranks whose first non-finite tensor this is; several if they exchange tensors within a module.
        module: Module name; empty for the model itself and for tensors outside it.
        tensor: Role of the tensor in the module: "the output", "the gradient of weight".
        stage: Pipeline-parallel rank of these ranks.
        number: Number of tensors that were checked earlier on the rank.
    """

    ranks: tuple[int, ...]
    module: str
    tensor: str
    phase: _Phase
    stage: int
    number: int

    def __str__(self) -> str:
        where = f" of {self.module!r}" if self.module else ""
        ranks = name_ranks(self.ranks)
        return f"the first tensor that is not finite is {self.tensor}{where}, in the {self.phase} pass of {ranks}"


def find_non_finite(model: nn.Module, replay: Callable[[Watch], None], *, ctx: DistributedContext) -> NonFinite | None:
    """Replay a bad step and return the first non-finite tensor, equal on every rank.

    `None` if the replay is finite, because random numbers or a hardware fault caused the bad step. Collective over all
    ranks: the collectives of `replay`, and two small all-gathers. Call it before the parameters change. The replay
    accumulates gradients and metrics, which the caller must discard.

    `model` is this rank's part of the model; in a pipeline, its stages. `replay` runs forward and backward with the
    batches of the step. It must pass the loss, and any other tensor to check outside modules, to the `Watch` function
    it receives.
    """
    probe = _Probe(ctx.coordinate("regular", "pp"))
    with probe.attached(model):
        replay(probe.watch)
    gathered = gather_json(None if probe.found is None else asdict(probe.found))
    found = [replace(NonFinite(**each), ranks=(rank,)) for rank, each in enumerate(gathered) if each is not None]
    if not found:
        return None
    first = min(found, key=_order)
    return replace(first, ranks=tuple(rank for each in found if _order(each) == _order(first) for rank in each.ranks))


def _order(found: NonFinite) -> tuple[int, int, int]:
    """Return a sort key whose minimum is the origin.

    Non-finite values propagate to later stages in forward and to earlier stages in backward.
    """
    return (0, found.stage, found.number) if found.phase == "forward" else (1, -found.stage, found.number)


@final
class _Probe:
    """Checker of tensors, which stops at the first non-finite one. Each check synchronizes the host with the device."""

    def __init__(self, stage: int) -> None:
        self.found: NonFinite | None = None
        self._stage, self._num_seen = stage, 0
        self._handles: list[RemovableHandle] = []

    @contextmanager
    def attached(self, model: nn.Module) -> Generator[None]:
        for name, module in model.named_modules():
            self._handles.append(module.register_forward_pre_hook(partial(self._before, name), with_kwargs=True))
            self._handles.append(module.register_forward_hook(partial(self._after, name)))
        try:
            yield
        finally:
            for handle in self._handles:
                handle.remove()

    def watch(self, name: str, tensor: torch.Tensor) -> None:
        self._look("", name, tensor, "forward")
        self._follow("", f"the gradient of {name}", tensor)

    def _before(self, module_name: str, module: nn.Module, *given: Any) -> None:
        # Inputs are checked as well as outputs, since a parent module may compute between two child modules.
        for tensor in _tensors(given):
            self._look(module_name, "an input", tensor, "forward")
            self._follow(module_name, "the gradient of an input", tensor)
        for name, parameter in module.named_parameters(recurse=False):
            self._look(module_name, name, parameter, "forward")
            self._follow(module_name, f"the gradient of {name}", parameter)

    def _after(self, module_name: str, _module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        for tensor in _tensors(output):
            self._look(module_name, "the output", tensor, "forward")

    def _follow(self, module: str, name: str, tensor: torch.Tensor) -> None:
        """Check the gradient of a tensor in backward, before it is reduced over ranks."""
        if tensor.requires_grad:
            hook = tensor.register_hook(lambda gradient: self._look(module, name, gradient, "backward"))
            self._handles.append(hook)

    @torch.no_grad()
    def _look(self, module: str, name: str, tensor: torch.Tensor, phase: _Phase) -> None:
        if self.found is not None:
            return
        local = local_tensor(tensor)
        if local.is_floating_point() and not bool(torch.isfinite(local).all()):
            self.found = NonFinite((), module, name, phase, self._stage, self._num_seen)
        self._num_seen += 1


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
