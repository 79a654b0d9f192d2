"""Runs a rank's part of a program: one small interpreter, whatever the schedule.

Today's interpreter runs all stages of a program on one rank, which is what a job without pipeline parallelism needs; a
stage hands its output to the next one in the same process, without copies.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from d9d_dist import set_gradient_sync
from d9d_pipeline.actions import Backward, Forward
from d9d_pipeline.program import Program

Outputs = Any
"""What a stage's forward returns: any pytree of tensors."""


class Inputs:
    """What a step feeds into a pipeline for one microbatch.

    Attributes:
        first: Positional arguments of the first stage; later stages get what the stage before them returned instead.
        shared: Keyword arguments of every stage, such as position ids, masks or labels.
    """

    __slots__ = ("first", "shared")

    def __init__(self, *first: Any, **shared: Any) -> None:
        self.first = first
        self.shared = shared


OutputHandler = Callable[[Outputs, int], torch.Tensor | None]
"""Called with the last stage's output of a microbatch, which is not kept, and the microbatch's index.

Returns the scalar to differentiate, a *sum* over the microbatch. In a program without backwards the answer is not used.
"""


@dataclass(slots=True)
class _Flight:
    """What is remembered of a stage's forward until its backward.

    Attributes:
        sources: Tensors that the backward starts from.
        received: For each tensor of the stage's input that needs a gradient, the leaf that gathers it.
    """

    sources: list[torch.Tensor]
    received: list[torch.Tensor]


@dataclass(slots=True)
class _Step:
    """What is under way within one step, by (stage, microbatch)."""

    inputs: Sequence[Inputs]
    on_output: OutputHandler
    outputs: dict[tuple[int, int], Outputs] = field(default_factory=dict)
    flights: dict[tuple[int, int], _Flight] = field(default_factory=dict)
    gradients: dict[tuple[int, int], list[torch.Tensor | None]] = field(default_factory=dict)


class Executor:
    """Runs a program of one rank over the stages that this rank holds.

    Gradients are summed over microbatches and reduced over ranks once, in each stage's last backward.

    Args:
        program: The program; of one rank.
        stages: The modules by global stage index.

    Raises:
        ValueError: If the program is for several ranks, or its stages are not those that were given.
    """

    def __init__(self, program: Program, stages: Mapping[int, nn.Module]) -> None:
        if len(program.ranks) != 1:
            raise ValueError(f"got a program for {len(program.ranks)} ranks; this executor runs programs of one rank.")
        if sorted(stages) != list(range(program.num_stages)):
            raise ValueError(
                f"got the stages {sorted(stages)}; the program has the stages 0 to {program.num_stages - 1}."
            )
        self._actions = program.ranks[0]
        self._num_microbatches = program.num_microbatches
        self._last_stage = program.num_stages - 1
        self._stages = dict(stages)
        self._last_backward = {
            action.stage: action.microbatch for action in self._actions if isinstance(action, Backward)
        }

    def step(self, inputs: Sequence[Inputs], on_output: OutputHandler) -> None:
        """Run the program once.

        Args:
            inputs: What goes in, for each microbatch.
            on_output: What to do with what comes out of the last stage: usually, compute the loss.

        Raises:
            ValueError: If there are not as many inputs as the program has microbatches, or a loss has no gradient.
        """
        if len(inputs) != self._num_microbatches:
            raise ValueError(f"got inputs for {len(inputs)} microbatches; the program has {self._num_microbatches}.")
        step = _Step(inputs, on_output)
        for action in self._actions:
            match action:
                case Forward(stage, microbatch):
                    self._forward(stage, microbatch, step)
                case Backward(stage, microbatch):
                    self._backward(stage, microbatch, step)

    def _forward(self, stage: int, microbatch: int, step: _Step) -> None:
        received: list[torch.Tensor] = []
        inputs = step.inputs[microbatch]
        payload = inputs.first
        if stage > 0:
            payload = (pytree.tree_map(_receive_into(received), step.outputs.pop((stage - 1, microbatch))),)
        result = self._stages[stage](*payload, **inputs.shared)
        if stage < self._last_stage:
            step.outputs[stage, microbatch] = result
            sources = [leaf for leaf in pytree.tree_leaves(result) if _needs_gradient(leaf)]
        else:
            loss = step.on_output(result, microbatch)
            sources = [] if loss is None else [loss]
            if stage in self._last_backward and not (sources and sources[0].requires_grad):
                # To skip the backward would leave other ranks waiting in its collectives.
                raise ValueError(
                    f"the loss of microbatch {microbatch} has no gradient; expected one that is computed from the "
                    "model's output. Multiply that by a mask instead of returning a constant; leave something to train."
                )
        if stage in self._last_backward:
            step.flights[stage, microbatch] = _Flight(sources, received)

    def _backward(self, stage: int, microbatch: int, step: _Step) -> None:
        if self._num_microbatches > 1:
            set_gradient_sync(self._stages[stage], microbatch == self._last_backward[stage])
        flight = step.flights.pop((stage, microbatch))
        sources, gradients = flight.sources, None
        if stage < self._last_stage:
            sources, gradients = _only_used(sources, step.gradients.pop((stage, microbatch)))
        if sources:
            torch.autograd.backward(sources, gradients)
        if stage > 0:
            step.gradients[stage - 1, microbatch] = [leaf.grad for leaf in flight.received]


def _needs_gradient(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad


def _receive_into(received: list[torch.Tensor]) -> Callable[[Any], Any]:
    """Cut the graph at a stage boundary: each tensor that needs a gradient becomes a leaf that gathers it."""

    def receive(leaf: Any) -> Any:
        if not _needs_gradient(leaf):
            return leaf
        leaf = leaf.detach().requires_grad_()
        received.append(leaf)
        return leaf

    return receive


def _only_used(
    sources: list[torch.Tensor], gradients: Sequence[torch.Tensor | None]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Drop the outputs that the next stage did not use."""
    pairs = [(source, grad) for source, grad in zip(sources, gradients, strict=True) if grad is not None]
    return [source for source, _ in pairs], [grad for _, grad in pairs]
