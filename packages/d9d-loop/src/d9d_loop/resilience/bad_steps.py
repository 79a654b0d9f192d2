"""Skipping of bad steps: steps with a non-finite loss or gradient norm, without weight, or with a loss spike.

All ranks decide together. On an accelerator, the optimizer step is skipped on the device, and the host reads the
decision one step later, without host-device synchronization. This requires an optimizer that accepts a flag on the
device (`d9d_loop.optimizers.gate`). For other optimizers the host waits for the flag. On a CPU, the decision uses
Python numbers, which are cheaper than tensors.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, assert_never, final

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from d9d_dist import DistributedContext, UserError, agree
from d9d_loop.optimizers.gate import counts_steps, gated, run_step, takes_gate, uncount_step
from d9d_loop.resilience.loss_window import LossWindow
from d9d_loop.resilience.resilience_config import BadStepAction, BadStepConfig
from d9d_loop.resilience.same_values import NOTHING, Same, describe_difference

Decision = Literal["report", "skip", "roll_back", "stop"]
Kind = Literal["non-finite", "no weight", "spike"]


@dataclass(frozen=True, slots=True)
class BadStep:
    """Bad step, and the joint decision of all ranks.

    Attributes:
        decision: `report`: the update was applied. `skip`: the update was skipped. `roll_back`: the caller must roll
            back to the last checkpoint and call `StepGuard.on_rollback`. `stop`: the caller must stop the job.
        why: Message that describes the step and the decision.
    """

    step: int
    kind: Kind
    loss: float
    grad_norm: float
    decision: Decision
    why: str


class BadStepError(RuntimeError):
    """Error on all ranks: a step was bad, and the policy for bad steps ends the job."""


@final
class StepGuard:
    """Guard that runs the optimizer steps, except bad ones."""

    def __init__(self, optimizer: Optimizer, *, config: BadStepConfig, ctx: DistributedContext) -> None:
        self._optimizer, self._config, self._ctx = optimizer, config, ctx
        self._is_on_host = _is_on_host(ctx.device)
        self._flags = torch.tensor(False), torch.tensor(True)
        self._losses = LossWindow(config)
        self._pending: list[_Measured] = []
        # Flags of the last step, if the optimizer counts steps.
        self._undecided: Callable[[], list[float]] | None = None
        self._skipped_on_replay: set[int] = set()  # steps whose update is skipped after a rollback
        self._rolled_back_from: set[int] = set()
        self._in_a_row = self._num_rollbacks = 0
        self.has_applied = False
        """True if an update was applied in one of the steps that `poll` has covered."""
        self.last_taken: bool | None = None
        """True if the last step was applied; `None` on an accelerator, where only the device knows it."""

    def step(
        self,
        step: int,
        *,
        loss: torch.Tensor,
        grad_norm: torch.Tensor,
        weight: torch.Tensor | None = None,
        same: Same = NOTHING,
    ) -> torch.Tensor:
        """Run the optimizer step unless it is bad; return a 0-dim bool tensor on the device, True if it was applied.

        Collective over all ranks: an all-reduce of a few numbers. It keeps the decision equal on all ranks even if
        their replicas differ because of a fault. The same all-reduce compares `same`.

        Args:
            step: Step number, counted from 1.
            loss: Weighted mean loss over the global batch, 0-dim.
            grad_norm: Global gradient norm, 0-dim.
            weight: Weight of the global batch, 0-dim; `None` for a positive one. An update without weight is skipped,
                because weight decay and momentum would still change the parameters.
            same: Values that must be equal on all ranks. If they differ, the update is skipped.

        Raises:
            UserError: On every rank, on a CPU, if `same` differs. On accelerators, `poll` raises it.
        """
        if self._is_on_host:
            is_empty = weight is not None and weight.item() == 0
            self.last_taken = self._step_on_host(step, loss.item(), grad_norm.item(), same, is_empty=is_empty)
            return self._flags[self.last_taken]
        return self._step_on_device(step, loss, grad_norm, weight, same)

    def _step_on_host(self, step: int, loss: float, grad_norm: float, same: Same, *, is_empty: bool) -> bool:
        is_skipped = step in self._skipped_on_replay
        non_finite = not (math.isfinite(loss) and math.isfinite(grad_norm))
        spike = self._losses.is_spike(step, loss)
        if self._ctx.world_size > 1:
            bad = torch.tensor([non_finite, is_empty, spike, *same.on_host()], dtype=torch.float64)
            dist.all_reduce(bad, op=dist.ReduceOp.MAX)
            non_finite, is_empty, spike, *largest = bad.tolist()
            if same.rates_differ(largest):
                agree(UserError(describe_difference(step, rates=True)))
        self._pending.append(_Measured(step, lambda: [non_finite, is_empty, spike, loss, grad_norm, 0, 0], is_skipped))
        taken = not (is_skipped or non_finite or is_empty or (spike and self._skips_spikes))
        if taken:
            run_step(self._optimizer)
        return taken

    def _step_on_device(
        self, step: int, loss: torch.Tensor, grad_norm: torch.Tensor, weight: torch.Tensor | None, same: Same
    ) -> torch.Tensor:
        is_skipped = step in self._skipped_on_replay
        # NaN > limit is False, so non-finite values have a flag of their own.
        non_finite = ~(torch.isfinite(loss) & torch.isfinite(grad_norm))
        spike = loss > self._losses.limit(step)
        is_empty = torch.zeros_like(spike) if weight is None else weight == 0
        bad = torch.stack([non_finite, is_empty, spike]).double()
        differs = torch.zeros_like(bad[:2])
        if self._ctx.world_size > 1:
            bad = torch.cat([bad, same.on_device(bad.device)])
            dist.all_reduce(bad, op=dist.ReduceOp.MAX)
            bad, differs = bad[:3], same.differs(bad[3:]).double()
        gate = torch.cat([bad if self._skips_spikes else bad[:2], differs]).amax().to(torch.float32)
        values = _copy_to_host_async(torch.stack([*bad, loss.double(), grad_norm.double(), *differs]))
        self._pending.append(_Measured(step, values, is_skipped))
        if is_skipped:
            return torch.zeros_like(gate, dtype=torch.bool)
        if takes_gate(self._optimizer):
            self._uncount_skipped_step()
            if counts_steps(self._optimizer):
                self._undecided = values
            with gated(self._optimizer, gate):
                run_step(self._optimizer)
        elif not gate:  # host-device synchronization
            run_step(self._optimizer)
        return gate == 0

    def _uncount_skipped_step(self) -> None:
        """Undo the host's step count of the previous step if that step was skipped.

        Waits for the decision on that step, which `poll` then reads without waiting.
        """
        if self._undecided is None:
            return
        non_finite, is_empty, spike, _, _, *differs = self._undecided()
        self._undecided = None
        if non_finite or is_empty or any(differs) or (spike and self._skips_spikes):
            uncount_step(self._optimizer)

    @property
    def _skips_spikes(self) -> bool:
        return self._config.spike in {"skip", "roll_back", "stop"}

    def poll(self, *, settle: bool = False) -> BadStep | None:
        """Return the next bad step that was not returned yet, or `None`. Equal on every rank.

        Call it after every `step`, until it returns `None` or a step with the decision `roll_back` or `stop`. On a CPU
        it covers all steps so far; on an accelerator, all but the latest.

        Args:
            settle: If True, synchronize with the device and cover the latest step too: before a save, and at the end.

        Raises:
            UserError: On every rank, if values that must be equal on all ranks have differed in a step.
        """
        if settle:
            self._uncount_skipped_step()
        unknown = 0 if settle or self._is_on_host else 1
        while len(self._pending) > unknown:
            if (bad := self._classify(self._pending.pop(0))) is not None:
                return bad
        return None

    def on_rollback(self) -> None:
        """Discard the pending measurements after a rollback to a checkpoint.

        When the steps are repeated, the updates of a spike and of the `spike_skip_before` steps before it are skipped.
        """
        self._pending.clear()
        self._undecided = None
        self._in_a_row = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as JSON: recent losses, steps to skip, and skipped steps in a row.

        Call it after `poll(settle=True)`, since pending measurements are not included.
        """
        return {
            "losses": self._losses.state_dict(),
            "left_out": sorted(self._skipped_on_replay),
            "in_a_row": self._in_a_row,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state_dict`. The restored steps to skip are added to those already known."""
        self._losses.load_state_dict(state["losses"])
        self._skipped_on_replay |= set(state["left_out"])
        self._in_a_row = state["in_a_row"]

    def _classify(self, measured: "_Measured") -> BadStep | None:
        non_finite, is_empty, spike, loss, grad_norm, *differs = measured.values()
        if any(differs):
            raise UserError(describe_difference(measured.step, rates=bool(differs[0])))
        is_spike = bool(spike) and self._config.spike != "ignore"
        if measured.is_skipped or not (non_finite or is_empty or is_spike):
            self._in_a_row = 0
            self.has_applied |= not measured.is_skipped
            if math.isfinite(loss) and not measured.is_skipped:
                self._losses.add(measured.step, loss)
            return None
        kind: Kind = "non-finite" if non_finite else "no weight" if is_empty else "spike"
        if kind == "spike" and self._config.spike == "report":
            self._losses.add(measured.step, loss)
        decision, why = self._decide(measured.step, kind)
        what = f"loss {loss:g}, gradient norm {grad_norm:g}"
        match kind:
            case "non-finite":
                what += " is not finite"
            case "no weight":
                what = "the loss weight is 0, for example because all labels are masked"
            case "spike":
                what += f" is a spike over {self._losses.median():g}"
        return BadStep(measured.step, kind, loss, grad_norm, decision, f"step {measured.step}: {what}; {why}")

    def _decide(self, step: int, kind: Kind) -> tuple[Decision, str]:
        config = self._config
        actions: dict[Kind, BadStepAction | Literal["report", "ignore"]] = {
            "non-finite": config.non_finite,
            "no weight": "skip",
            "spike": config.spike,
        }
        action = actions[kind]
        match action:
            case "stop":
                return "stop", "the policy is stop."
            case "roll_back":
                return self._roll_back(step, kind)
            case "report" | "ignore":
                self.has_applied = True
                return "report", "its update was applied."
            case "skip":
                self._in_a_row += 1
                if self._in_a_row >= config.max_in_a_row:
                    return "stop", f"it is bad step {self._in_a_row} in a row, so the job stops."
                return "skip", "its update was skipped."
            case _:
                assert_never(action)

    def _roll_back(self, step: int, kind: Kind) -> tuple[Decision, str]:
        if step in self._rolled_back_from:
            return "stop", "it is bad again after a rollback: data or model are the cause, not a hardware fault."
        if self._num_rollbacks >= self._config.max_rollbacks:
            return "stop", f"the job has already rolled back {self._num_rollbacks} times."
        self._num_rollbacks += 1
        self._rolled_back_from.add(step)
        if kind == "spike":
            self._skipped_on_replay |= set(range(step - self._config.spike_skip_before, step + 1))
        return "roll_back", "the job rolls back to its last checkpoint."


@dataclass(frozen=True, slots=True)
class _Measured:
    """Measurements of a step.

    `values` returns the flags for non-finite, no weight and spike, the loss and the gradient norm, then the flags of
    `Same.differs`.
    """

    step: int
    values: Callable[[], list[float]]
    is_skipped: bool


def _copy_to_host_async(values: torch.Tensor) -> Callable[[], list[float]]:
    """Start an asynchronous copy to the host; return a function that waits for it and returns the numbers."""
    if values.device.type == "cpu":
        return values.tolist
    on_host = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=True)
    on_host.copy_(values, non_blocking=True)
    copied = torch.Event(values.device)
    copied.record()

    def wait() -> list[float]:
        copied.synchronize()
        return on_host.tolist()

    return cache(wait)


def _is_on_host(device: torch.device) -> bool:
    """Return True if results are available to the host without synchronization."""
    return device.type == "cpu"
