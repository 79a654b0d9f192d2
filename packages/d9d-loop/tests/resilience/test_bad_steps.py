import math
import random
from collections.abc import Callable
from statistics import median
from typing import Any

import pytest
import torch
from torch import nn

from d9d_dist import DistributedContext, MeshConfig
from d9d_dist.testing import run_ranks
from d9d_loop.optimizers import ScheduleFreeAdamW
from d9d_loop.resilience import BadStep, BadStepConfig, StepGuard, bad_steps

_NAN, _INF = math.nan, math.inf
_CALM = [1.0, 1.1, 0.9, 1.05, 0.95]
Build = Callable[[nn.Module], torch.optim.Optimizer]


def _model() -> nn.Module:
    return nn.Linear(2, 1, dtype=torch.float64)


def _fused(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)


def _foreach(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1, foreach=True)


def _steps(
    losses: list[float],
    ctx: DistributedContext,
    *,
    build: Build = _foreach,
    norms: list[float] | None = None,
    state: dict[str, Any] | None = None,
    first: int = 1,
    **config: Any,
) -> tuple[StepGuard, list[BadStep | None], list[bool]]:
    """Run scripted losses; return the guard, its decisions, and whether the parameters changed in each step."""
    model = _model()
    guard = StepGuard(build(model), config=BadStepConfig(**config), ctx=ctx)
    if state is not None:
        guard.load_state_dict(state)
    verdicts, moved = _go_on(guard, model, losses, norms=norms, first=first)
    return guard, verdicts, moved


def _go_on(
    guard: StepGuard, model: nn.Module, losses: list[float], *, norms: list[float] | None = None, first: int = 1
) -> tuple[list[BadStep | None], list[bool]]:
    verdicts, moved = [], []
    for index, loss in enumerate(losses):
        before = [parameter.detach().clone() for parameter in model.parameters()]
        norm = 1.0 if norms is None else norms[index]
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, norm * 0.1)
        taken = guard.step(first + index, loss=torch.tensor(loss, dtype=torch.float64), grad_norm=torch.tensor(norm))
        verdicts.append(guard.poll(settle=True))
        after = list(model.parameters())
        moved.append(any(not torch.equal(a, b) for a, b in zip(before, after, strict=True)))
        assert bool(taken) is moved[-1]
        assert all(bool(torch.isfinite(parameter).all()) for parameter in after)
    return verdicts, moved


def _decisions(verdicts: list[BadStep | None]) -> list[str | None]:
    return [None if verdict is None else verdict.decision for verdict in verdicts]


@pytest.fixture(params=["on host, foreach", "on device, fused", "on device, foreach"])
def build(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Build:
    """Return an optimizer with or without kernels that take a flag; decide on host or device."""
    monkeypatch.setattr(bad_steps, "_is_on_host", lambda _device: "on host" in request.param)
    return _fused if "fused" in request.param else _foreach


@pytest.mark.parametrize(("loss", "norm"), [(_NAN, 1.0), (1.0, _NAN), (1.0, _INF), (-_INF, 1.0)])
def test_a_non_finite_step_changes_nothing(build: Build, loss: float, norm: float, ctx: DistributedContext) -> None:
    _, verdicts, moved = _steps([1.0, loss, 1.0], ctx, build=build, norms=[1.0, norm, 1.0])
    assert moved == [True, False, True]
    assert verdicts[0] is verdicts[2] is None
    assert verdicts[1] is not None
    assert (verdicts[1].step, verdicts[1].kind, verdicts[1].decision) == (2, "non-finite", "skip")
    assert verdicts[1].why == f"step 2: loss {loss:g}, gradient norm {norm:g} is not finite; its update was skipped."


def test_a_skipped_step_has_no_effect(build: Build, ctx: DistributedContext) -> None:
    """Moments and step counts must not change either: they determine the next update."""
    results = []
    for losses in ([1.0, _NAN, 1.0], [1.0, 1.0]):
        torch.manual_seed(0)
        model = _model()
        optimizer = build(model)
        guard = StepGuard(optimizer, config=BadStepConfig(), ctx=ctx)
        _go_on(guard, model, losses)
        results.append([*model.parameters(), *(value for each in optimizer.state.values() for value in each.values())])
    assert len(results[0]) == 8
    for skipped, never in zip(*results, strict=True):
        assert torch.equal(skipped, never)


def test_skipped_steps_are_removed_from_the_step_count_of_an_optimizer(
    ctx: DistributedContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host reads a decision one step late, so the optimizer has counted the step by then."""
    monkeypatch.setattr(bad_steps, "_is_on_host", lambda _device: False)
    results = []
    for losses in ([_NAN, 1.0, _NAN, 1.0, _NAN], [1.0, 1.0]):
        torch.manual_seed(0)
        model = _model()
        optimizer = ScheduleFreeAdamW(model.parameters(), lr=0.1)
        guard = StepGuard(optimizer, config=BadStepConfig(), ctx=ctx)
        for step, loss in enumerate(losses, 1):
            for number, parameter in enumerate(model.parameters(), 1):
                parameter.grad = torch.full_like(parameter, _NAN if math.isnan(loss) else number)
            guard.step(step, loss=torch.tensor(loss), grad_norm=torch.tensor(1.0))
            guard.poll()
        guard.poll(settle=True)
        group = optimizer.param_groups[0]
        assert group["steps"] == 2
        results.append([*model.parameters(), torch.tensor(group["weight_sum"])])
    for skipped, never in zip(*results, strict=True):
        assert torch.equal(skipped, never)


def test_a_step_without_weight_has_no_effect(build: Build, ctx: DistributedContext) -> None:
    model = _model()
    guard = StepGuard(build(model), config=BadStepConfig(non_finite="stop", spike_after=1), ctx=ctx)
    for step, weight in enumerate((3.0, 0.0, 3.0, 3.0), 1):
        before = [parameter.detach().clone() for parameter in model.parameters()]
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter) * weight
        loss = torch.tensor(1.0 if weight else 0.0)
        taken = guard.step(step, loss=loss, grad_norm=torch.tensor(weight), weight=torch.tensor(weight))
        bad = guard.poll(settle=True)
        assert bool(taken) is (weight > 0)
        assert all(map(torch.equal, model.parameters(), before)) is (weight == 0)
        assert (None if bad is None else (bad.kind, bad.decision)) == (None if weight else ("no weight", "skip"))
    assert [step for step, _ in guard.state_dict()["losses"]] == [1, 3, 4]


def test_too_many_consecutive_skips_stop_the_job(ctx: DistributedContext) -> None:
    losses = [_NAN, _NAN, 1.0, _NAN, _NAN, _NAN]
    _, verdicts, _ = _steps(losses, ctx, max_in_a_row=3)
    assert _decisions(verdicts) == ["skip", "skip", None, "skip", "skip", "stop"]
    assert verdicts[-1] is not None
    assert verdicts[-1].why.endswith("it is bad step 3 in a row, so the job stops.")


def test_the_policy_stop_leaves_the_parameters(ctx: DistributedContext) -> None:
    _, verdicts, moved = _steps([_NAN], ctx, non_finite="stop")
    assert verdicts[0] is not None
    assert verdicts[0].decision == "stop"
    assert moved == [False]


def test_a_step_is_rolled_back_once(ctx: DistributedContext) -> None:
    model = _model()
    guard = StepGuard(_foreach(model), config=BadStepConfig(non_finite="roll_back"), ctx=ctx)
    verdicts, _ = _go_on(guard, model, [1.0, 1.0, _NAN])
    assert verdicts[-1] is not None
    assert verdicts[-1].decision == "roll_back"
    guard.on_rollback()
    verdicts, _ = _go_on(guard, model, [1.0, _NAN], first=2)
    assert verdicts[-1] is not None
    assert verdicts[-1].decision == "stop"
    assert "it is bad again after a rollback" in verdicts[-1].why


def test_the_number_of_rollbacks_is_limited(ctx: DistributedContext) -> None:
    _, verdicts, _ = _steps([_NAN, _NAN, _NAN], ctx, non_finite="roll_back", max_rollbacks=2)
    assert _decisions(verdicts) == ["roll_back", "roll_back", "stop"]


def test_a_spike_is_skipped(build: Build, ctx: DistributedContext) -> None:
    losses = [*_CALM, 9.0, 1.0, 9.0]
    guard, verdicts, moved = _steps(losses, ctx, build=build, spike="skip", spike_after=4)
    assert moved == [True] * 5 + [False, True, False]
    assert [verdict and verdict.kind for verdict in verdicts] == [None] * 5 + ["spike", None, "spike"]
    assert 9.0 not in [float.fromhex(loss) for _, loss in guard.state_dict()["losses"]]
    assert verdicts[5] is not None
    assert verdicts[5].why.startswith(f"step 6: loss 9, gradient norm 1 is a spike over {median(_CALM):g}; ")


def test_a_spike_is_reported_by_default_and_may_be_ignored(ctx: DistributedContext) -> None:
    _, verdicts, moved = _steps([*_CALM, 9.0], ctx, spike_after=4)
    assert verdicts[-1] is not None
    assert verdicts[-1].decision == "report"
    assert moved == [True] * 6
    assert _steps([*_CALM, 9.0], ctx, spike_after=4, spike="ignore")[1] == [None] * 6


def test_after_a_rollback_the_spike_and_the_step_before_are_skipped(ctx: DistributedContext) -> None:
    model = _model()
    guard = StepGuard(_foreach(model), config=BadStepConfig(spike="roll_back", spike_after=4), ctx=ctx)
    verdicts, _ = _go_on(guard, model, [*_CALM, 9.0])
    assert verdicts[-1] is not None
    assert verdicts[-1].decision == "roll_back"
    guard.on_rollback()
    verdicts, moved = _go_on(guard, model, [*_CALM[2:], 9.0, 1.0], first=3)
    assert moved == [True, True, False, False, True]
    assert verdicts == [None] * 5


def test_a_resumed_guard_makes_the_same_decisions(ctx: DistributedContext) -> None:
    config: dict[str, Any] = {"spike": "skip", "spike_after": 4, "spike_window": 6, "max_in_a_row": 3}
    choice = random.Random(0)  # noqa: S311 - no secret
    decisions: set[str] = set()
    for _ in range(15):
        losses = choice.choices([1.0, 1.1, 0.9, 4.0, _NAN], [4, 3, 3, 2, 2], k=18)
        at = choice.randrange(1, 18)
        _, whole, moved = _steps(losses, ctx, **config)
        guard, first, moved_first = _steps(losses[:at], ctx, **config)
        _, second, moved_second = _steps(losses[at:], ctx, state=guard.state_dict(), first=at + 1, **config)
        assert moved == moved_first + moved_second
        assert [verdict and verdict.why for verdict in whole] == [verdict and verdict.why for verdict in first + second]
        decisions |= {f"{verdict.kind} {verdict.decision}" for verdict in whole if verdict is not None}
    assert decisions >= {"non-finite skip", "spike skip", "non-finite stop"}


def _disagree() -> tuple[list[str | None], list[bool]]:
    with MeshConfig(data_parallel_replicate=-1).build() as ctx:
        losses = [1.0, _NAN if ctx.rank == 1 else 1.0, 1.0]
        _, verdicts, moved = _steps(losses, ctx)
        return _decisions(verdicts), moved


def test_one_rank_decides_for_all() -> None:
    assert run_ranks(_disagree, world_size=2) == [([None, "skip", None], [True, False, True])] * 2
