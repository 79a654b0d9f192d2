"""Runs a rank's part of a program: one small interpreter, whatever the schedule."""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils import _pytree as pytree

from d9d_dist import LaterGradients, UserError
from d9d_pipeline._channel import Arriving, Channel, Kind
from d9d_pipeline._message import Description
from d9d_pipeline._stage import Flight, Stage
from d9d_pipeline._stopwatch import Mark, Stopwatch
from d9d_pipeline.actions import (
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Loss,
    Overlap,
    ReceiveInput,
    ReceiveOutputGradient,
    SendInputGradient,
    SendOutput,
    parts,
)
from d9d_pipeline.program import Program
from d9d_pipeline.timeline import TimedAction, Timeline

Outputs: TypeAlias = Any
"""What a stage's forward returns: any tree of tensors."""


@final
class Inputs:
    """What a step feeds into a pipeline for one microbatch; the same on all ranks of the pipeline.

    Attributes:
        first: Positional arguments of the first stage; later stages get what the stage before them returned instead.
        shared: Keyword arguments of every stage, such as position ids, masks or labels.
    """

    __slots__ = ("first", "shared")

    def __init__(self, *first: Any, **shared: Any) -> None:
        self.first = first
        self.shared = shared


OutputHandler: TypeAlias = Callable[[Outputs, int], Tensor | None]
"""Called with the last stage's output of a microbatch, which is not kept, and the microbatch's index.

Returns the scalar to differentiate, a *sum* over the microbatch. In a program without backwards the answer is not used.
"""

_Place: TypeAlias = tuple[int, int]
"""A stage and a microbatch."""


@final
@dataclass(slots=True)
class _Step:
    """What is under way within one step; everything is dropped as soon as it is used."""

    inputs: Sequence[Inputs]
    kinds: Sequence[Kind]
    on_output: OutputHandler
    action: Action | None = None
    arriving: dict[_Place, Arriving] = field(default_factory=dict)
    outputs: dict[_Place, Outputs] = field(default_factory=dict)
    flights: dict[_Place, Flight] = field(default_factory=dict)
    arriving_gradients: dict[_Place, Arriving] = field(default_factory=dict)
    gradients: dict[_Place, list[Tensor | None]] = field(default_factory=dict)
    later: dict[_Place, LaterGradients] = field(default_factory=dict)
    stopwatch: Stopwatch | None = None
    ready: Mark | None = None

    def begin(self, action: Action) -> None:
        """An action is next."""
        self.action, self.ready = action, None

    def arrived(self) -> None:
        """What the action needs is there: what comes now is computed, not waited for."""
        if self.stopwatch is not None:
            self.ready = self.stopwatch.mark()


@final
class Executor:
    """Runs one rank of a program over the stages that this rank holds.

    Gradients are summed over microbatches and reduced over ranks once, in each stage's last backward.

    Args:
        program: The program.
        stages: This rank's modules by global stage index.
        group: The ranks of the pipeline, as many as the program has; None for a program of one rank.
        device: Where stages compute; by default where the first parameter of one is.

    Raises:
        UserError: If the group has not as many ranks as the program, or the program gives this rank other stages.
    """

    def __init__(
        self,
        program: Program,
        stages: Mapping[int, nn.Module],
        *,
        group: dist.ProcessGroup | None = None,
        device: torch.device | None = None,
    ) -> None:
        num_ranks = 1 if group is None else group.size()
        if len(program.ranks) != num_ranks:
            raise UserError(
                f"got a program for {len(program.ranks)} ranks and a group of {num_ranks}; expected equally many. "
                "Build the program for the group's size, and pass the group of the pipeline's ranks."
            )
        self._rank = 0 if group is None else group.rank()
        expected = program.stages_of(self._rank)
        if tuple(sorted(stages)) != expected:
            raise UserError(
                f"got the stages {sorted(stages)} on pipeline rank {self._rank}; expected {list(expected)}, which the "
                "program gives it."
            )
        self._program, self._group = program, group
        self._actions = program.ranks[self._rank]
        self._num_microbatches = program.num_microbatches
        self._stages = {index: _stage(program, self._rank, index, module) for index, module in stages.items()}
        devices = (parameter.device for module in stages.values() for parameter in module.parameters())
        self._device = device or next(devices, torch.device("cpu"))
        self._channel = None if group is None else Channel(group, self._device)

    def step(self, inputs: Sequence[Inputs], on_output: OutputHandler) -> None:
        """Run the program once. Collective over the ranks of the pipeline: sends and receives of the program.

        An exception, whether of this rank or because another one is gone, ends the step; its notes say where it was.

        Args:
            inputs: What goes in, for each microbatch.
            on_output: What to do with what comes out of the last stage, on the rank that holds it: usually, compute the
                loss.

        Raises:
            UserError: If there are not as many inputs as the program has microbatches, a loss has no gradient, or a
                stage returns what cannot be sent.
        """
        with self._under_way(inputs, on_output) as step:
            for action in self._actions:
                step.begin(action)
                self._run(action, step)

    def measured_step(self, inputs: Sequence[Inputs], on_output: OutputHandler) -> Timeline:
        """Run the program once, as `step` does, and measure it.

        Collective as `step` is; besides, ranks wait for each other before it, and exchange their times after it.

        Args:
            inputs: What goes in, for each microbatch.
            on_output: What to do with what comes out of the last stage.

        Returns:
            What was computed when, in seconds, on all ranks of the pipeline. Their clocks are set alike by the waiting.
        """
        if self._group is not None:
            dist.barrier(self._group)
        stopwatch = Stopwatch(self._device)
        marks: list[tuple[Mark, Mark]] = []
        with self._under_way(inputs, on_output) as step:
            step.stopwatch = stopwatch
            for action in self._actions:
                step.begin(action)
                start = stopwatch.mark()
                self._run(action, step)
                marks.append((start if step.ready is None else step.ready, stopwatch.mark()))
        times = [(stopwatch.seconds(start), stopwatch.seconds(end)) for start, end in marks]
        return self._timeline(times)

    @contextmanager
    def _under_way(self, inputs: Sequence[Inputs], on_output: OutputHandler) -> Generator[_Step]:
        """What both kinds of step have in common: checks before, and what is said of a failure."""
        if len(inputs) != self._num_microbatches:
            raise UserError(f"got inputs for {len(inputs)} microbatches; expected {self._num_microbatches}.")
        step = _Step(inputs, self._kinds(inputs), on_output)
        try:
            yield step
            step.action = None
            if self._channel is not None:
                self._channel.finish()
        except Exception as error:
            error.add_note(f"{_where(step.action)}, on pipeline rank {self._rank}")
            raise

    def _kinds(self, inputs: Sequence[Inputs]) -> list[Kind]:
        """For each microbatch what the shapes within the pipeline follow from."""
        if self._program.num_stages > 1 and self._program.trains:
            for each in inputs:
                if any(isinstance(x, Tensor) and x.requires_grad for x in pytree.tree_leaves(each.shared)):
                    raise UserError(
                        "got a tensor that needs a gradient among the keyword arguments of all stages; expected none, "
                        "since each stage would have a part of it. Let the first stage compute it, and pass it on."
                    )
        if self._channel is None:
            return [()] * len(inputs)
        return [
            tuple(
                (leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else None
                for leaf in pytree.tree_leaves((each.first, each.shared))
            )
            for each in inputs
        ]

    def _run(self, action: Action, step: _Step) -> None:
        match action:
            case Forward(stage, microbatch):
                self._forward(stage, microbatch, step)
            case Loss(stage, microbatch):
                self._loss(stage, microbatch, step)
            case Backward(stage, microbatch):
                place = stage, microbatch
                gradients = self._gradients_of(place, step)
                step.gradients[place] = self._stages[stage].backward(step.flights.pop(place), gradients, microbatch)
            case BackwardInput(stage, microbatch):
                place = stage, microbatch
                gradients = self._gradients_of(place, step)
                backward = self._stages[stage].backward_input
                step.gradients[place], step.later[place] = backward(step.flights.pop(place), gradients)
            case BackwardWeight(stage, microbatch):
                self._stages[stage].backward_weight(step.later.pop((stage, microbatch)), microbatch)
            case Overlap():
                for part in parts(action):
                    self._run(part, step)
            case _:
                self._transfer(action, step)

    def _transfer(
        self, action: SendOutput | ReceiveInput | SendInputGradient | ReceiveOutputGradient, step: _Step
    ) -> None:
        channel = self._channel
        assert channel is not None, "a program of several ranks has a group"
        place, peer = (action.stage, action.microbatch), action.peer
        shapes = step.kinds[action.microbatch]
        match action:
            case ReceiveInput(stage):
                step.arriving[place] = channel.receive(kind=("output", stage - 1, shapes), peer=peer)
            case SendOutput(stage):
                leaves, tree = pytree.tree_flatten(step.outputs.pop(place))
                description = Description.of(leaves, tree)
                channel.send(leaves, description, kind=("output", stage, shapes), peer=peer)
            case ReceiveOutputGradient(stage):
                kind = "gradient", stage + 1, shapes
                step.arriving_gradients[place] = channel.receive(kind=kind, peer=peer)
            case SendInputGradient(stage):
                channel.send_gradients(step.gradients.pop(place), kind=("gradient", stage, shapes), peer=peer)

    def _forward(self, stage: int, microbatch: int, step: _Step) -> None:
        inputs, place = step.inputs[microbatch], (stage, microbatch)
        args = inputs.first if stage == 0 else (self._input_of(place, step),)
        step.outputs[place], flight = self._stages[stage].forward(args, inputs.shared)
        if flight is not None:
            step.flights[place] = flight

    def _input_of(self, place: _Place, step: _Step) -> Outputs:
        arriving = step.arriving.pop(place, None)
        if arriving is None:  # the stage before is on this rank
            stage, microbatch = place
            return step.outputs.pop((stage - 1, microbatch))
        leaves = arriving.wait()
        step.arrived()
        for leaf, expected in zip(leaves, arriving.description.leaves, strict=True):
            if leaf is not None and expected is not None and expected.needs_gradient:
                leaf.requires_grad_()
        assert arriving.description.tree is not None, "outputs are trees"
        return pytree.tree_unflatten(leaves, arriving.description.tree)

    def _loss(self, stage: int, microbatch: int, step: _Step) -> None:
        loss = step.on_output(step.outputs.pop((stage, microbatch)), microbatch)
        if not self._stages[stage].trains:
            return
        if loss is None or not loss.requires_grad:
            # To skip the backward would leave other ranks waiting in its collectives.
            raise UserError(
                f"the loss of microbatch {microbatch} has no gradient; expected one that is computed from the "
                "model's output. Multiply that by a mask instead of returning a constant; leave something to train."
            )
        step.flights[stage, microbatch].sources = [get_gradient_edge(loss)]
        step.gradients[stage + 1, microbatch] = [torch.ones_like(loss)]

    def _gradients_of(self, place: _Place, step: _Step) -> list[Tensor | None]:
        """Those of what a stage returned."""
        stage, microbatch = place
        arriving = step.arriving_gradients.pop(place, None)
        if arriving is None:  # the stage after is on this rank, or the loss
            return step.gradients.pop((stage + 1, microbatch))
        gradients = arriving.wait()
        step.arrived()
        return gradients

    def _timeline(self, times: list[tuple[float, float]]) -> Timeline:
        """The times of all ranks, of this rank's own."""
        most = max(map(len, self._program.ranks))
        own = torch.tensor([*times, *[(0.0, 0.0)] * (most - len(times))], dtype=torch.float64, device=self._device)
        everyones = [own]
        if self._group is not None:
            everyones = [torch.empty_like(own) for _ in self._program.ranks]
            dist.all_gather(everyones, own, group=self._group)
        return Timeline(
            tuple(
                tuple(TimedAction(action, *span) for action, span in zip(actions, each.tolist(), strict=False))
                for actions, each in zip(self._program.ranks, everyones, strict=True)
            ),
            unit="s",
        )


def _stage(program: Program, rank: int, index: int, module: nn.Module) -> Stage:
    last_backward, splits = None, False
    for action in program.computed(rank):
        for part in parts(action):
            if part.stage == index and isinstance(part, Backward | BackwardInput | BackwardWeight):
                last_backward = part.microbatch
                splits = splits or not isinstance(part, Backward)
    return Stage(
        module,
        is_first=index == 0,
        is_last=index == program.num_stages - 1,
        last_backward=last_backward,
        splits=splits,
        accumulates=program.num_microbatches > 1,
    )


def _where(action: Action | None) -> str:
    match action:
        case None:
            return "at the end of the step"
        case Overlap(forward, backward):
            return f"in the overlap of {forward!r} and {backward!r}"
        case _:
            return f"in {type(action).__name__} of stage {action.stage}, microbatch {action.microbatch}"
