"""Interpreter of one rank of a program, for any schedule."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils import _pytree as pytree

from d9d_dist import UserError
from d9d_dist.split_backward import DeferredWeightGrads
from d9d_pipeline._message import Description
from d9d_pipeline._stage import ForwardState, Stage
from d9d_pipeline._stopwatch import Mark, Stopwatch
from d9d_pipeline.actions import (
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    ComputeLoss,
    Forward,
    Overlap,
    ReceiveInput,
    ReceiveOutputGradient,
    SendInputGradient,
    SendOutput,
    Transfer,
    parts,
)
from d9d_pipeline.channel import Arriving, Channel, Kind, Messages
from d9d_pipeline.inputs import Inputs
from d9d_pipeline.program import Program
from d9d_pipeline.timeline import TimedAction, Timeline

Outputs: TypeAlias = Any
"""Return value of a stage's forward: any tree of tensors."""


OutputHandler: TypeAlias = Callable[[Outputs, int], Tensor | None]
"""Function of the last stage's output for a microbatch, and the microbatch's index. The output is not kept.

In training it returns the loss: a scalar, *summed* over the microbatch. Without backwards its result is ignored.
"""

_Pair: TypeAlias = tuple[int, int]
"""A (stage, microbatch) pair."""


@final
@dataclass(slots=True)
class _Step:
    """State of one step; each entry is removed when it is used, so that its memory is freed.

    `kinds` has the shapes and dtypes of each microbatch's inputs, a part of the key of cached message metadata. `ready`
    is the start of the current action, or the arrival of its input, if the step is measured. Microbatches from
    `num_own` on are stand-ins.
    """

    inputs: Sequence[Inputs]
    num_own: int
    kinds: Sequence[Kind]
    on_output: OutputHandler
    stopwatch: Stopwatch | None
    ready: Mark = 0.0
    arriving: dict[_Pair, Arriving] = field(default_factory=dict)
    outputs: dict[_Pair, Outputs] = field(default_factory=dict)
    forward_states: dict[_Pair, ForwardState] = field(default_factory=dict)
    arriving_gradients: dict[_Pair, Arriving] = field(default_factory=dict)
    gradients: dict[_Pair, list[Tensor | None]] = field(default_factory=dict)
    deferred: dict[_Pair, DeferredWeightGrads] = field(default_factory=dict)

    def mark_ready(self) -> None:
        """In a measured step, record that the current action starts now, or that its input has arrived."""
        if self.stopwatch is not None:
            self.ready = self.stopwatch.mark()


@final
class Executor:
    """Interpreter of one rank of a program on the stages that this rank holds.

    Gradients are summed over microbatches. Data-parallel gradients are reduced over ranks once per step, in each
    stage's last backward. With `reduce_each_microbatch`, FSDP gradients are reduced in each backward instead.

    Args:
        stages: This rank's stage modules by global stage index.
        group: Process group of the pipeline, with as many ranks as the program; None for a program of one rank.
        device: Device that the stages compute on; by default the device of the first parameter, or the CPU without
            parameters.
        messages: Metadata of all messages between stages; by default, ranks send it with the first message.
        reduce_each_microbatch: True to keep only this rank's shard of FSDP gradients between microbatches, at the cost
            of one reduce-scatter per microbatch instead of one per step.

    Raises:
        UserError: If the sizes of the group and the program differ, or the program assigns other stages to this rank.
            Also for `reduce_each_microbatch` with split backwards, whose weight gradients FSDP cannot reduce.
    """

    def __init__(
        self,
        program: Program,
        stages: Mapping[int, nn.Module],
        *,
        group: dist.ProcessGroup | None = None,
        device: torch.device | None = None,
        messages: Messages | None = None,
        reduce_each_microbatch: bool = False,
    ) -> None:
        num_ranks = 1 if group is None else group.size()
        if len(program.ranks) != num_ranks:
            raise UserError(
                f"got a program for {len(program.ranks)} ranks and a group of {num_ranks}; expected equal sizes. "
                "Build the program with num_ranks=group.size(), and pass the process group of the pipeline."
            )
        self._rank = 0 if group is None else group.rank()
        expected = program.stages_of(self._rank)
        if tuple(sorted(stages)) != expected:
            raise UserError(
                f"got the stages {sorted(stages)} on pipeline rank {self._rank}; expected {list(expected)}, the "
                f"stages that the program assigns to it. Pass the modules of program.stages_of({self._rank})."
            )
        self._program, self._group = program, group
        if reduce_each_microbatch and program.splits:
            raise UserError(
                "got reduce_each_microbatch = True and a schedule with split backward passes; expected a schedule "
                "without them, because FSDP cannot reduce deferred weight gradients. Choose one, such as 1F1B."
            )
        accumulates = program.num_microbatches > 1 and not reduce_each_microbatch
        self._stages = {
            index: _stage(program, self._rank, index, module, accumulates=accumulates)
            for index, module in stages.items()
        }
        devices = (parameter.device for module in stages.values() for parameter in module.parameters())
        self._device = device or next(devices, torch.device("cpu"))
        self._channel = None if group is None else Channel(group, self._device, messages)

    def step(self, inputs: Sequence[Inputs], on_output: OutputHandler, *, num_own: int | None = None) -> None:
        """Execute the program once. Collective over the pipeline: all sends and receives of the program.

        A note on an exception names the action, stage, microbatch and rank. If another rank failed, a send or receive
        raises the exception.

        Args:
            inputs: Inputs of each microbatch.
            on_output: Called with each output of the last stage, on its rank. In training it returns the loss.
            num_own: Number of microbatches that count; the forwards of later ones, the stand-ins, change no buffers.
                `None` if all count.

        Raises:
            UserError: If the number of inputs differs from the program's microbatches, a loss does not require a
                gradient, or a stage's output cannot be sent.
        """
        self._execute(inputs, on_output, None, num_own)

    def measured_step(
        self, inputs: Sequence[Inputs], on_output: OutputHandler, *, num_own: int | None = None
    ) -> Timeline:
        """Execute the program like `step`; return start and end of every action on all pipeline ranks, in seconds.

        Collective over the pipeline: a barrier before the step, which aligns the ranks' clocks, and an all-gather of
        the times.
        """
        if self._group is not None:
            dist.barrier(self._group)
        stopwatch = Stopwatch(self._device)
        marks = self._execute(inputs, on_output, stopwatch, num_own)
        return self._timeline([(stopwatch.seconds(start), stopwatch.seconds(end)) for start, end in marks])

    def _execute(
        self, inputs: Sequence[Inputs], on_output: OutputHandler, stopwatch: Stopwatch | None, num_own: int | None
    ) -> list[tuple[Mark, Mark]]:
        """Run all actions and complete all sends; return start and end of each action if there is a stopwatch."""
        if len(inputs) != self._program.num_microbatches:
            raise UserError(
                f"got inputs for {len(inputs)} microbatches; expected {self._program.num_microbatches}, as in the "
                "program. Pass one Inputs per microbatch."
            )
        step = _Step(inputs, len(inputs) if num_own is None else num_own, self._kinds(inputs), on_output, stopwatch)
        marks: list[tuple[Mark, Mark]] = []
        action: Action | None = None
        try:
            for action in self._program.ranks[self._rank]:
                if stopwatch is None:
                    self._run(action, step)
                    continue
                step.mark_ready()
                self._run(action, step)
                marks.append((step.ready, stopwatch.mark()))
            action = None
            if self._channel is not None:
                self._channel.finish()
        except Exception as error:
            error.add_note(f"{_describe(action)}, on pipeline rank {self._rank}")
            raise
        return marks

    def _kinds(self, inputs: Sequence[Inputs]) -> list[Kind]:
        """Return the shapes and dtypes of each microbatch's inputs, which determine the metadata of all messages."""
        if self._program.num_stages > 1 and self._program.trains:
            for each in inputs:
                if any(isinstance(x, Tensor) and x.requires_grad for x in pytree.tree_leaves(each.shared)):
                    raise UserError(
                        "got a tensor with requires_grad among the shared keyword arguments; expected none, since "
                        "each stage would compute only a part of its gradient. Compute it in the first stage, and "
                        "pass it on in the stages' outputs."
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
            case ComputeLoss(stage, microbatch):
                self._loss(stage, microbatch, step)
            case Backward(stage, microbatch):
                pair = stage, microbatch
                state, gradients = step.forward_states.pop(pair), self._gradients_of(pair, step)
                step.gradients[pair] = self._stages[stage].backward(state, gradients, microbatch)
            case BackwardInput(stage, microbatch):
                pair = stage, microbatch
                state, gradients = step.forward_states.pop(pair), self._gradients_of(pair, step)
                step.gradients[pair], step.deferred[pair] = self._stages[stage].backward_input(state, gradients)
            case BackwardWeight(stage, microbatch):
                self._stages[stage].backward_weight(step.deferred.pop((stage, microbatch)), microbatch)
            case Overlap():
                for part in parts(action):
                    self._run(part, step)
            case _:
                self._transfer(action, step)

    def _transfer(self, action: Transfer, step: _Step) -> None:
        channel = self._channel
        assert channel is not None, "only a program of several ranks has transfers"
        pair, peer = (action.stage, action.microbatch), action.peer
        shapes = step.kinds[action.microbatch]
        match action:
            case ReceiveInput(stage):
                step.arriving[pair] = channel.receive(kind=("output", stage - 1, shapes), peer=peer)
            case SendOutput(stage):
                leaves, tree = pytree.tree_flatten(step.outputs.pop(pair))
                channel.send(leaves, Description.of(leaves, tree), kind=("output", stage, shapes), peer=peer)
            case ReceiveOutputGradient(stage):
                step.arriving_gradients[pair] = channel.receive(kind=("gradient", stage + 1, shapes), peer=peer)
            case SendInputGradient(stage):
                channel.send_gradients(step.gradients.pop(pair), kind=("gradient", stage, shapes), peer=peer)

    def _forward(self, stage: int, microbatch: int, step: _Step) -> None:
        inputs, pair = step.inputs[microbatch], (stage, microbatch)
        args = inputs.first if stage == 0 else (self._input_of(pair, step),)
        is_stand_in = microbatch >= step.num_own
        step.outputs[pair], state = self._stages[stage].forward(args, inputs.shared, is_stand_in=is_stand_in)
        if state is not None:
            step.forward_states[pair] = state

    def _input_of(self, pair: _Pair, step: _Step) -> Outputs:
        arriving = step.arriving.pop(pair, None)
        if arriving is None:  # the previous stage is on this rank
            stage, microbatch = pair
            return step.outputs.pop((stage - 1, microbatch))
        leaves = arriving.wait()
        step.mark_ready()
        for leaf, expected in zip(leaves, arriving.description.leaves, strict=True):
            if leaf is not None and expected is not None and expected.needs_gradient:
                leaf.requires_grad_()
        assert arriving.description.tree is not None, "outputs are sent with their tree"
        return pytree.tree_unflatten(leaves, arriving.description.tree)

    def _loss(self, stage: int, microbatch: int, step: _Step) -> None:
        loss = step.on_output(step.outputs.pop((stage, microbatch)), microbatch)
        if not self._stages[stage].trains:
            return
        if not isinstance(loss, Tensor | None):
            raise UserError(
                f"got a loss of microbatch {microbatch} of type {type(loss).__name__}; expected a 0-dim tensor. Do not "
                "call item()."
            )
        if loss is not None and loss.dim():
            raise UserError(
                f"got a loss of microbatch {microbatch} of shape {tuple(loss.shape)}; expected a 0-dim tensor. Sum it."
            )
        if loss is None or not loss.requires_grad:
            # Raise instead of skipping the backward, because other ranks would wait in its collectives.
            raise UserError(
                f"got a loss of microbatch {microbatch} that does not require a gradient; expected a loss computed "
                "from the model's output. Multiply the output by a mask instead of returning a constant, and leave "
                "some parameters trainable."
            )
        step.forward_states[stage, microbatch].sources = [get_gradient_edge(loss)]
        step.gradients[stage + 1, microbatch] = [torch.ones_like(loss)]

    def _gradients_of(self, pair: _Pair, step: _Step) -> list[Tensor | None]:
        stage, microbatch = pair
        arriving = step.arriving_gradients.pop(pair, None)
        if arriving is None:  # the next stage, or the loss, is on this rank
            return step.gradients.pop((stage + 1, microbatch))
        gradients = arriving.wait()
        step.mark_ready()
        return gradients

    def _timeline(self, times: list[tuple[float, float]]) -> Timeline:
        """All-gather the times of this rank's actions, and return the timeline of all ranks."""
        longest = max(map(len, self._program.ranks))
        own = torch.tensor([*times, *[(0.0, 0.0)] * (longest - len(times))], dtype=torch.float64, device=self._device)
        gathered = [own]
        if self._group is not None:
            gathered = [torch.empty_like(own) for _ in self._program.ranks]
            dist.all_gather(gathered, own, group=self._group)
        return Timeline(
            tuple(
                tuple(TimedAction(action, *span) for action, span in zip(actions, each.tolist(), strict=False))
                for actions, each in zip(self._program.ranks, gathered, strict=True)
            ),
            unit="s",
        )


def _stage(program: Program, rank: int, index: int, module: nn.Module, *, accumulates: bool) -> Stage:
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
        accumulates=accumulates,
    )


def _describe(action: Action | None) -> str:
    match action:
        case None:
            return "at the end of the step"
        case Overlap(forward, backward):
            return f"in the overlap of {forward!r} and {backward!r}"
        case _:
            return f"in {type(action).__name__} of stage {action.stage}, microbatch {action.microbatch}"
