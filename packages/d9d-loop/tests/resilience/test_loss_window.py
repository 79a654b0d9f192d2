import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from d9d_loop.resilience import BadStepConfig
from d9d_loop.resilience.loss_window import LossWindow

_CONFIG = BadStepConfig(spike_window=10, spike_after=4, spike_deviations=3)


@given(st.lists(st.tuples(st.floats(-10, 10), st.integers(1, 3)), min_size=1, max_size=40), st.integers(0, 40))
def test_the_limit_equals_the_formula_of_two_steps_before(drawn: list[tuple[float, int]], resumed_at: int) -> None:
    window, step, known = LossWindow(_CONFIG), 0, list[tuple[int, float]]()
    for count, (loss, gap) in enumerate(drawn):
        step += gap  # skipped steps have no losses
        losses = [each for earlier, each in known if earlier < step - 1][-10:]
        assert window.limit(step) == pytest.approx(_reference(losses), rel=1e-9, abs=1e-9)
        limit = window.limit(step)
        assert not window.is_spike(step, limit)
        assert window.is_spike(step, math.nextafter(limit, math.inf)) == math.isfinite(limit)
        window.add(step, loss)
        known.append((step, loss))
        if count == resumed_at:
            state = json.loads(json.dumps(window.state_dict()))
            window = LossWindow(_CONFIG)
            window.load_state_dict(state)
        assert window.median() == pytest.approx(
            torch.tensor([each for _, each in known[-11:]], dtype=torch.float64).quantile(0.5).item()
        )


def _reference(losses: list[float]) -> float:
    if len(losses) < 4:
        return math.inf
    values = torch.tensor(losses, dtype=torch.float64)
    middle = values.quantile(0.5)
    deviation = torch.maximum(1.4826 * (values - middle).abs().quantile(0.5), 0.01 * middle.abs())
    limit = (middle + 3 * deviation).item()
    if min(losses) <= 0:
        return limit
    logarithms = values.log()
    middle = (logarithms.sort().values[(len(losses) - 1) // 2] + logarithms.sort().values[len(losses) // 2]) / 2
    deviation = (1.4826 * (logarithms - middle).abs().quantile(0.5)).clamp(min=0.01)
    return max(limit, (middle + 3 * deviation).clamp(max=700).exp().item())


def _spikes(losses: list[float]) -> list[int]:
    window, found = LossWindow(BadStepConfig()), list[int]()
    for step, loss in enumerate(losses, 1):
        if loss > window.limit(step):
            found.append(step)
        window.add(step, loss)
    return found


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("batch_size", [8, 64])
def test_a_healthy_run_with_a_long_tail_of_losses_has_no_spikes(seed: int, batch_size: int) -> None:
    noise = torch.randn(300, batch_size, 4, generator=torch.Generator().manual_seed(seed)).prod(-1)
    residual = 3 * torch.exp(-torch.arange(300) / 40)  # the losses of examples/quickstart.py
    losses = (noise.square().mean(1) + residual.square()).tolist()
    assert _spikes(losses) == []
    assert max(losses[20:]) > 5 * sorted(losses[20:])[140]


@pytest.mark.parametrize("seed", range(4))
def test_spikes_of_a_language_model_are_found(seed: int) -> None:
    noise = 0.05 * torch.randn(400, generator=torch.Generator().manual_seed(seed))
    losses = (2 + 8 * torch.exp(-torch.arange(400) / 60) + noise).tolist()
    assert _spikes(losses) == []
    losses[300] += 1.5
    losses[301] += 1
    assert _spikes(losses) == [301, 302]


def test_no_spikes_if_ignored() -> None:
    window = LossWindow(BadStepConfig(spike="ignore", spike_after=1))
    for step in range(1, 6):
        window.add(step, 1.0)
    assert window.limit(9) == math.inf
