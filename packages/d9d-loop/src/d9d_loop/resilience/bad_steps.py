"""Keeps a bad step away from the parameters: one whose loss or gradient is not finite, or whose loss is a spike.

All ranks decide together. On an accelerator they do so there: the optimizer's update is left out on the device, and
the host learns of it a step later, so that it never waits. This needs an optimizer whose kernels take a flag, as
torch's fused ones do (`found_inf`, the protocol of `torch.amp.GradScaler`); for others the host waits for the flag. On
a CPU there is nothing to wait for, and plain numbers are cheaper than tensors.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, final

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from d9d_dist import DistributedContext
from d9d_loop.resilience.loss_window import LossWindow
from d9d_loop.resilience.resilience_config import BadStepConfig

Decision = Literal["report", "skip", "rewind", "stop"]


@dataclass(frozen=True, slots=True)
class BadStep:
    """What all ranks decided about a step.

    Attributes:
        step: The step, counted from 1.
        kind: What was wrong with it.
        loss: Its loss.
        grad_norm: Its global gradient norm.
        decision: What to do: nothing but report it; nothing more, because its update was left out; go back to the last
            checkpoint and call `StepGuard.rewound`; stop.
        why: The same for people.
    """

    step: int
    kind: Literal["non-finite", "spike"]
    loss: float
    grad_norm: float
    decision: Decision
    why: str


@final
class StepGuard:
    """Takes the optimizer's steps, but for bad ones.

    Args:
        optimizer: Over the model's trainable parameters.
        config: What to do about bad steps.
        ctx: The job's context.
    """

    def __init__(self, optimizer: Optimizer, *, config: BadStepConfig, ctx: DistributedContext) -> None:
        self._optimizer, self._config, self._ctx = optimizer, config, ctx
        self._is_on_host = _is_on_host(ctx.device)
        self._losses = LossWindow(config)
        self._pending: list[_Measured] = []
        self._left_out: set[int] = set()  # steps whose update is left out when they come again
        self._rewound_from: set[int] = set()
        self._in_a_row = self._num_rewinds = 0

    def step(self, step: int, *, loss: torch.Tensor, grad_norm: torch.Tensor) -> torch.Tensor:
        """Take the optimizer's step, unless it is a bad one.

        Collective over all ranks: an all-reduce of two numbers, so that replicas which differ, as they never should, do
        not part.

        Args:
            step: The step, counted from 1.
            loss: Weighted mean over the global batch, 0-dim.
            grad_norm: Global norm of the gradients, 0-dim.

        Returns:
            Whether it was taken, 0-dim bool, on the device.
        """
        limit = self._losses.limit(step)
        is_left_out = step in self._left_out
        if self._is_on_host:
            taken = self._step_on_host(step, loss.item(), grad_norm.item(), limit=limit, is_left_out=is_left_out)
            return torch.tensor(taken)
        return self._step_on_device(step, loss, grad_norm, limit=limit, is_left_out=is_left_out)

    def _step_on_host(self, step: int, loss: float, grad_norm: float, *, limit: float, is_left_out: bool) -> bool:
        non_finite, spike = not (math.isfinite(loss) and math.isfinite(grad_norm)), loss > limit
        if self._ctx.world_size > 1:
            bad = torch.tensor([non_finite, spike], dtype=torch.float32)
            dist.all_reduce(bad, op=dist.ReduceOp.MAX)
            non_finite, spike = map(bool, bad.tolist())
        self._pending.append(_Measured(step, lambda: [non_finite, spike, loss, grad_norm], is_left_out))
        taken = not (is_left_out or non_finite or (spike and self._spikes_are_left_out))
        if taken:
            self._optimizer.step()
        return taken

    def _step_on_device(
        self, step: int, loss: torch.Tensor, grad_norm: torch.Tensor, *, limit: float, is_left_out: bool
    ) -> torch.Tensor:
        # What exceeds its limit, and what is no number, which compares as false.
        bad = torch.stack([~(torch.isfinite(loss) & torch.isfinite(grad_norm)), loss > limit]).to(torch.float32)
        if self._ctx.world_size > 1:
            dist.all_reduce(bad, op=dist.ReduceOp.MAX)
        gate = (bad if self._spikes_are_left_out else bad[:1]).amax()
        values = _on_its_way(torch.stack([*bad.double(), loss.double(), grad_norm.double()]))
        self._pending.append(_Measured(step, values, is_left_out))
        if is_left_out:
            return torch.zeros_like(gate, dtype=torch.bool)
        if not _takes_flag(self._optimizer):
            if not gate:  # the host waits here
                self._optimizer.step()
            return gate == 0
        optimizer: Any = self._optimizer  # it takes the flag as an attribute, as `GradScaler` gives it
        optimizer.found_inf, optimizer.grad_scale = gate, None
        try:
            self._optimizer.step()
        finally:
            del optimizer.found_inf, optimizer.grad_scale
        return gate == 0

    @property
    def _spikes_are_left_out(self) -> bool:
        return self._config.spike in {"skip", "rewind", "stop"}

    def verdict(self, *, settle: bool = False) -> BadStep | None:
        """What was decided about the next bad step that the host knows of and has not told; equal on every rank.

        To be called after every `step`, until it gives `None` or a step to go back from or to stop for. On a CPU the
        last step is known, on an accelerator the one before it.

        Args:
            settle: Whether to wait for the device and take the last step: before a save, and at the end.
        """
        unknown = 0 if settle or self._is_on_host else 1
        while len(self._pending) > unknown:
            judged = self._judge(self._pending.pop(0))
            if judged is not None:
                return judged
        return None

    def rewound(self) -> None:
        """Forget what came after the checkpoint that the job has gone back to; its updates are taken again.

        The updates of a spike, and of the steps just before it, are left out when they come again.
        """
        self._pending.clear()
        self._in_a_row = 0

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps, as JSON: recent losses and what to leave out. After `verdict(settle=True)`."""
        return {
            "losses": self._losses.state_dict(),
            "left_out": sorted(self._left_out),
            "in_a_row": self._in_a_row,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` gave. What to leave out is added to what is known already."""
        self._losses.load_state_dict(state["losses"])
        self._left_out |= set(state["left_out"])
        self._in_a_row = state["in_a_row"]

    def _judge(self, measured: "_Measured") -> BadStep | None:
        non_finite, spike, loss, grad_norm = measured.values()
        is_spike = bool(spike) and self._config.spike != "ignore"
        if measured.is_left_out or not (non_finite or is_spike):
            self._in_a_row = 0
            if math.isfinite(loss) and not measured.is_left_out:
                self._losses.add(measured.step, loss)
            return None
        kind: Literal["non-finite", "spike"] = "non-finite" if non_finite else "spike"
        if kind == "spike" and self._config.spike == "report":
            self._losses.add(measured.step, loss)
        decision, why = self._decide(measured.step, kind)
        what = f"step {measured.step}: loss {loss:g}, gradient norm {grad_norm:g}"
        what += " is not finite" if non_finite else f" is a spike over {self._losses.median():g}"
        return BadStep(measured.step, kind, loss, grad_norm, decision, f"{what}; {why}")

    def _decide(self, step: int, kind: Literal["non-finite", "spike"]) -> tuple[Decision, str]:
        config = self._config
        wish = config.non_finite if kind == "non-finite" else config.spike
        if wish == "stop":
            return "stop", "the configuration says stop."
        if wish == "rewind":
            return self._rewind(step, kind)
        if wish in {"report", "ignore"}:
            return "report", "its update was taken."
        self._in_a_row += 1
        if self._in_a_row >= config.max_in_a_row:
            return "stop", f"it is the {self._in_a_row}th in a row, so the job stops."
        return "skip", "its update was left out."

    def _rewind(self, step: int, kind: Literal["non-finite", "spike"]) -> tuple[Decision, str]:
        if step in self._rewound_from:
            return "stop", "it is so again after going back, so data or model make it, no fault of a machine."
        if self._num_rewinds >= self._config.max_rewinds:
            return "stop", f"the job has gone back {self._num_rewinds} times already."
        self._num_rewinds += 1
        self._rewound_from.add(step)
        if kind == "spike":
            self._left_out |= set(range(step - self._config.spike_skip_before, step + 1))
        return "rewind", "the job goes back to its last checkpoint."


@dataclass(frozen=True, slots=True)
class _Measured:
    """What a step measured: `values` gives whether it was not finite or a spike, its loss and its gradient norm."""

    step: int
    values: Callable[[], list[float]]
    is_left_out: bool


def _on_its_way(values: torch.Tensor) -> Callable[[], list[float]]:
    """Copy numbers to the host, which waits for them only when it asks."""
    if values.device.type == "cpu":
        return values.tolist
    on_host = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=True)
    on_host.copy_(values, non_blocking=True)
    copied = torch.Event(values.device)
    copied.record()

    def wait() -> list[float]:
        copied.synchronize()
        return on_host.tolist()

    return wait


def _is_on_host(device: torch.device) -> bool:
    """Whether the host knows at once what is computed there."""
    return device.type == "cpu"


def _takes_flag(optimizer: Optimizer) -> bool:
    """Whether its kernels leave an update out where a flag on the device says so; torch's protocol for it."""
    has_protocol = getattr(optimizer, "_step_supports_amp_scaling", False)
    return has_protocol and all(group.get("fused", True) for group in optimizer.param_groups)
