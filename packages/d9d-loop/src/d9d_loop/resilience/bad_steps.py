"""Keeps a bad step away from the parameters: one whose loss or gradient is not finite, or whose loss is a spike.

All ranks decide together, on the device: the optimizer's update is left out there, and the host learns of it a step
later, so that it never waits for the device. This needs an optimizer whose kernels take a flag, as torch's fused ones
do (`found_inf`, the protocol of `torch.amp.GradScaler`). For others the host waits for the flag on an accelerator; on a
CPU there is nothing to wait for.

A loss is a spike if it exceeds

    median + deviations * max(1.4826 * MAD, 0.01 * |median|)

of a window of losses that ends two steps before it, where MAD is the median distance from the median (Leys et al.:
"Detecting outliers", 2013); 1.4826 MAD is the standard deviation of normal numbers, and the other term keeps a plateau
from having no deviation at all. Two steps, because the host does not know the last one.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal, final

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from d9d_dist import DistributedContext
from d9d_loop.resilience.resilience_config import BadStepConfig

_MAD_TO_DEVIATION = 1.4826
_LEAST_DEVIATION = 0.01  # of the median
_UNKNOWN_STEPS = 1  # before a step, of which the host of an accelerator knows nothing yet

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
        self._losses: deque[tuple[int, float]] = deque(maxlen=config.spike_window + _UNKNOWN_STEPS)  # with their steps
        self._pending: list[_Measured] = []
        self._left_out: set[int] = set()  # steps whose update is left out when they come again
        self._rewound_from: set[int] = set()
        self._in_a_row = self._num_rewinds = 0

    def step(self, step: int, *, loss: torch.Tensor, grad_norm: torch.Tensor) -> None:
        """Take the optimizer's step, unless it is a bad one.

        Collective over all ranks: an all-reduce of two numbers on the device, so that replicas which differ, as they
        never should, do not part.

        Args:
            step: The step, counted from 1.
            loss: Weighted mean over the global batch, 0-dim.
            grad_norm: Global norm of the gradients, 0-dim.
        """
        known = [loss for earlier, loss in self._losses if earlier < step - _UNKNOWN_STEPS]
        limit = spike_limit(known, self._config)
        acts = self._config.spike in {"skip", "rewind", "stop"}
        # What exceeds its limit, and what is no number, which compares as false.
        bad = torch.stack([~(torch.isfinite(loss) & torch.isfinite(grad_norm)), loss > limit]).to(torch.float32)
        if self._ctx.world_size > 1:
            dist.all_reduce(bad, op=dist.ReduceOp.MAX)
        gates = bad if acts else bad[:1]
        is_left_out = step in self._left_out
        measured = _Measured(step, torch.stack([*bad.double(), loss.double(), grad_norm.double()]), is_left_out)
        self._pending.append(measured)
        if is_left_out:
            return
        if not _takes_flag(self._optimizer):
            if not gates.any():  # on an accelerator the host waits here
                self._optimizer.step()
            return
        optimizer: Any = self._optimizer  # it takes the flag as an attribute, as `GradScaler` gives it
        optimizer.found_inf, optimizer.grad_scale = gates.amax(), None
        try:
            self._optimizer.step()
        finally:
            del optimizer.found_inf, optimizer.grad_scale

    def verdict(self, *, settle: bool = False) -> BadStep | None:
        """What was decided about the next bad step that the host knows of and has not told; equal on every rank.

        To be called after every `step`, until it gives `None` or a step to go back from or to stop for. On a CPU the
        last step is known, on an accelerator the one before it.

        Args:
            settle: Whether to wait for the device and take the last step: before a save, and at the end.
        """
        unknown = 0 if settle or self._ctx.device.type == "cpu" else _UNKNOWN_STEPS
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
            "losses": [[step, float(loss).hex()] for step, loss in self._losses],
            "left_out": sorted(self._left_out),
            "in_a_row": self._in_a_row,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` gave. What to leave out is added to what is known already."""
        self._losses.clear()
        self._losses.extend((step, float.fromhex(loss)) for step, loss in state["losses"])
        self._left_out |= set(state["left_out"])
        self._in_a_row = state["in_a_row"]

    def _judge(self, measured: "_Measured") -> BadStep | None:
        non_finite, spike, loss, grad_norm = measured.values()
        is_spike = bool(spike) and self._config.spike != "ignore"
        if measured.is_left_out or not (non_finite or is_spike):
            self._in_a_row = 0
            if math.isfinite(loss) and not measured.is_left_out:
                self._losses.append((measured.step, loss))
            return None
        kind: Literal["non-finite", "spike"] = "non-finite" if non_finite else "spike"
        if kind == "spike" and self._config.spike == "report":
            self._losses.append((measured.step, loss))
        decision, why = self._decide(measured.step, kind)
        what = f"step {measured.step}: loss {loss:g}, gradient norm {grad_norm:g}"
        what += " is not finite" if non_finite else f" is a spike over {self._median():g}"
        return BadStep(measured.step, kind, loss, grad_norm, decision, f"{what}; {why}")

    def _median(self) -> float:
        return median(loss for _, loss in self._losses)

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


def spike_limit(losses: Sequence[float], config: BadStepConfig) -> float:
    """The loss from which on one is a spike after others; infinite if they are too few, or nobody wants to know.

    See the equation at the top of this file.
    """
    window = losses[-config.spike_window :]
    if config.spike == "ignore" or len(window) < config.spike_after:
        return math.inf
    middle = median(window)
    deviation = _MAD_TO_DEVIATION * median(abs(loss - middle) for loss in window)
    return middle + config.spike_deviations * max(deviation, _LEAST_DEVIATION * abs(middle))


@final
class _Measured:
    """What a step measured, on its way to the host, which it does not keep waiting."""

    def __init__(self, step: int, values: torch.Tensor, is_left_out: bool) -> None:
        self.step, self.is_left_out = step, is_left_out
        self._event: torch.Event | None = None
        self._values = values
        if values.device.type != "cpu":
            self._values = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._event = torch.Event(values.device)
            self._event.record()

    def values(self) -> list[float]:
        if self._event is not None:
            self._event.synchronize()
        return self._values.tolist()


def _takes_flag(optimizer: Optimizer) -> bool:
    """Whether its kernels leave an update out where a flag on the device says so; torch's protocol for it."""
    has_protocol = getattr(optimizer, "_step_supports_amp_scaling", False)
    return has_protocol and all(group.get("fused", True) for group in optimizer.param_groups)
