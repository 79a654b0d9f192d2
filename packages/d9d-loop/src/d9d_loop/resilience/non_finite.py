"""Finds where a number that is not finite comes from: the first module, tensor and rank, by doing a bad step again.

Behind a reduction every rank has the same NaN, and a module that gets one gives one. So the step's batches are run once
more, with every input, output, parameter gradient and loss looked at on its own rank, in the order in which they come
to be. That costs a few times the step, and nothing on any other step.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, final

import torch
from pydantic import TypeAdapter
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from d9d_dist import DistributedContext, all_gather_variadic

Watch: TypeAlias = Callable[[str, torch.Tensor], None]
"""Looks at a tensor, and later at its gradient, by a name: "the loss"."""

_Phase = Literal["forward", "backward"]


@dataclass(frozen=True, slots=True)
class NonFinite:
    """The first tensor that is not finite.

    Attributes:
        ranks: The ranks on which it is the first one; several where they exchange tensors within a module.
        module: The module's name; empty for the model itself, or what is outside of it.
        tensor: What it is to the module: "the output", "the gradient of weight".
        phase: Whether forward or backward.
        stage: The place in the pipeline of these ranks.
        number: How many tensors were looked at before it on its rank.
    """

    ranks: tuple[int, ...]
    module: str
    tensor: str
    phase: _Phase
    stage: int
    number: int

    def __str__(self) -> str:
        """For people."""
        where = f" of {self.module!r}" if self.module else ""
        ranks = f"rank{'s' if self.ranks[1:] else ''} {', '.join(map(str, self.ranks))}"
        return f"the first tensor that is not finite is {self.tensor}{where}, in the {self.phase} pass of {ranks}"


_NON_FINITE = TypeAdapter(NonFinite)


def find_non_finite(model: nn.Module, replay: Callable[[Watch], None], *, ctx: DistributedContext) -> NonFinite | None:
    """Do a bad step again, and find where what is not finite comes from.

    Collective over all ranks: what `replay` does, and two small all-gathers. Parameters are to be as they were in the
    step, so call it before they change; gradients and metrics are the caller's to throw away.

    Args:
        model: This rank's part of the model: its stages, in a pipeline.
        replay: Runs forward and backward with the batches of the step. It gives the loss, and whatever else is to be
            looked at outside of modules, to the function that it gets.
        ctx: The job's context.

    Returns:
        What was found, equal on every rank; `None` if everything is finite this time. Then random numbers made it, or
        a machine.
    """
    probe = _Probe(ctx.coordinate("regular", "pp"))
    with probe.attached(model):
        replay(probe.watch)
    found = _gather(probe.found, ctx)
    if not found:
        return None
    first = min(found, key=_order)
    return replace(first, ranks=tuple(rank for each in found if _order(each) == _order(first) for rank in each.ranks))


def _order(found: NonFinite) -> tuple[int, int, int]:
    """Which rank's was first: stages pass on what is not finite, forward to later, backward to earlier ones."""
    return (0, found.stage, found.number) if found.phase == "forward" else (1, -found.stage, found.number)


@final
class _Probe:
    """Looks at tensors until it has found one; the host waits for the device every time."""

    def __init__(self, stage: int) -> None:
        self.found: NonFinite | None = None
        self._stage, self._num_seen = stage, 0
        self._handles: list[RemovableHandle] = []

    @contextmanager
    def attached(self, model: nn.Module) -> Generator[None]:
        for name, module in model.named_modules():
            self._handles.append(module.register_forward_pre_hook(self._before(name), with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._after(name)))
        try:
            yield
        finally:
            for handle in self._handles:
                handle.remove()

    def watch(self, name: str, tensor: torch.Tensor) -> None:
        self._look("", name, tensor, "forward")
        self._follow("", f"the gradient of {name}", tensor)

    def _before(self, module_name: str) -> Callable[..., None]:
        def look(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            # Inputs of inner modules are outputs of others, but for what their parent does to them in between.
            for tensor in _tensors((args, kwargs)):
                self._look(module_name, "an input", tensor, "forward")
                self._follow(module_name, "the gradient of an input", tensor)
            for name, parameter in module.named_parameters(recurse=False):
                self._look(module_name, name, parameter, "forward")
                self._follow(module_name, f"the gradient of {name}", parameter)

        return look

    def _after(self, module_name: str) -> Callable[..., None]:
        def look(_module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
            for tensor in _tensors(output):
                self._look(module_name, "the output", tensor, "forward")

        return look

    def _follow(self, module: str, name: str, tensor: torch.Tensor) -> None:
        """Look at a gradient when it comes, before it is reduced over ranks."""
        if tensor.requires_grad:
            hook = tensor.register_hook(lambda gradient: self._look(module, name, gradient, "backward"))
            self._handles.append(hook)

    @torch.no_grad()
    def _look(self, module: str, name: str, tensor: torch.Tensor, phase: _Phase) -> None:
        if self.found is not None:
            return
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if local.is_floating_point() and not bool(torch.isfinite(local).all()):
            self.found = NonFinite((), module, name, phase, self._stage, self._num_seen)
        self._num_seen += 1


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _gather(found: NonFinite | None, ctx: DistributedContext) -> list[NonFinite]:
    """What all ranks found, as bytes of JSON: nothing of a peer is unpickled."""
    mine = b"" if found is None else _NON_FINITE.dump_json(found)
    if ctx.world_size == 1:
        texts = [mine]
    else:
        data = torch.tensor(list(mine), dtype=torch.uint8, device=ctx.device)
        texts = [bytes(each.tolist()) for each in all_gather_variadic(data)]
    return [replace(_NON_FINITE.validate_json(text), ranks=(rank,)) for rank, text in enumerate(texts) if text]
