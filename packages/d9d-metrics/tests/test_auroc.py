import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from d9d_metrics import BinaryAUROC, compute_metrics


def drawn(seed: int, num_samples: int, *, num_values: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return correlated logits and targets of both classes, with ties if `num_values` is small."""
    draws = torch.Generator().manual_seed(seed)
    targets = torch.randint(0, 2, (num_samples,), generator=draws)
    targets[:2] = torch.tensor([0, 1])
    logits = torch.randn(num_samples, generator=draws, dtype=torch.float64) * 3 + targets
    return (logits if num_values is None else (logits * num_values / 8).round() * 8 / num_values), targets


@pytest.mark.slow
@settings(max_examples=20)
@given(seed=st.integers(0, 2**31), num_samples=st.integers(2, 60), num_values=st.sampled_from([None, 4]))
def test_the_value_is_exact_while_all_samples_are_stored(seed: int, num_samples: int, num_values: int | None) -> None:
    from sklearn.metrics import roc_auc_score

    logits, targets = drawn(seed, num_samples, num_values=num_values)
    metric = BinaryAUROC(num_bins=8, exact_samples=60, logits=True)
    metric.update(logits[:5], targets[:5])
    metric.update(logits[5:].view(-1, 1), targets[5:].view(-1, 1))
    value = metric.compute()
    assert value["value"].item() == pytest.approx(roc_auc_score(targets, logits), rel=1e-12)
    assert value["error_bound"].item() == 0.0


@pytest.mark.slow
@settings(max_examples=20)
@given(
    seed=st.integers(0, 2**31),
    num_samples=st.integers(2, 3000),
    num_bins=st.sampled_from([4, 64, 4096]),
    logits=st.booleans(),
)
def test_the_error_is_within_the_reported_bound(seed: int, num_samples: int, num_bins: int, logits: bool) -> None:
    from sklearn.metrics import roc_auc_score

    scores, targets = drawn(seed, num_samples)
    metric = BinaryAUROC(num_bins=num_bins, exact_samples=num_samples // 4, logits=logits)
    metric.update(scores if logits else scores.sigmoid(), targets)
    value = {name: tensor.item() for name, tensor in metric.compute().items()}
    assert abs(value["value"] - roc_auc_score(targets, scores)) <= value["error_bound"] + 1e-12


def test_the_bound_of_evenly_spread_scores_is_half_a_bin() -> None:
    place = torch.linspace(-1, 1, 100_001, dtype=torch.float64)[1:-1]
    metric = BinaryAUROC(num_bins=1000, logits=True)
    metric.update(place / (1 - place.abs()), torch.arange(place.numel()) % 2)
    assert metric.compute()["error_bound"].item() == pytest.approx(1 / 2000, rel=1e-3)


def test_one_sample_too_many_falls_back_to_bins() -> None:
    logits, targets = torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.tensor([0, 1, 0, 0])
    metric = BinaryAUROC(num_bins=2, exact_samples=3, logits=True)
    metric.update(logits, targets)
    assert metric.compute()["error_bound"].item() == 0.0
    metric.update(torch.tensor([-1.0]), torch.tensor([0]))
    assert metric.compute()["value"].item() == pytest.approx((1 + 3 / 2) / 4)
    assert metric.compute()["error_bound"].item() == pytest.approx(3 / 2 / 4)
    metric.reset()
    metric.update(logits, targets)
    assert metric.compute()["error_bound"].item() == 0.0


def test_probabilities_of_zero_and_one_have_a_bin() -> None:
    metric = BinaryAUROC()
    metric.update(torch.tensor([0.0, 1.0, 0.5, 1 - 1e-7, 1e-7], dtype=torch.float64), torch.tensor([0, 1, 1, 1, 0]))
    assert metric.compute()["value"].item() == 1.0
    assert metric.compute()["error_bound"].item() == 0.0


def test_masked_samples_are_ignored() -> None:
    metric = BinaryAUROC(exact_samples=4)
    scores, targets = torch.tensor([0.1, math.nan, 0.9, 0.4]), torch.tensor([0, 1, 1, 0])
    metric.update(scores, targets, torch.tensor([True, False, True, False]))
    assert compute_metrics({"auroc": metric}, None) == {"auroc/value": 1.0, "auroc/error_bound": 0.0}


@pytest.mark.parametrize("exact_samples", [0, 4])
def test_one_class_or_nan_gives_nan(exact_samples: int) -> None:
    metric = BinaryAUROC(exact_samples=exact_samples)
    assert metric.compute()["value"].isnan()
    metric.update(torch.tensor([0.5]), torch.tensor([1]))
    assert metric.compute()["value"].isnan()
    metric.update(torch.tensor([0.5, math.nan]), torch.tensor([0, 0]))
    assert metric.compute()["value"].isnan()
    assert metric.compute()["error_bound"].isnan()


def test_combined_states_of_ranks_give_the_exact_value() -> None:
    whole, parts = BinaryAUROC(exact_samples=8, logits=True), []
    for seed in range(2):
        logits, targets = drawn(seed, 4)
        part = BinaryAUROC(exact_samples=8, logits=True)
        part.update(logits, targets)
        whole.update(logits, targets)
        parts.append(part.state_dict())
    gathered = BinaryAUROC(exact_samples=8, logits=True)
    for name, accumulator in gathered.accumulators().items():
        for part in parts:
            accumulator.update(part[name])
    assert np.isclose(gathered.compute()["value"].item(), whole.compute()["value"].item(), rtol=1e-15)
    assert gathered.compute()["error_bound"].item() == 0.0


def test_rounding_errors_of_probabilities_are_clamped() -> None:
    metric = BinaryAUROC(exact_samples=0)
    metric.update(torch.tensor([-1e-7, 0.2, 1 + 1e-6]), torch.tensor([0, 1, 1]))
    assert metric.compute()["value"].item() == 1.0


def test_the_value_is_exact_by_default() -> None:
    from sklearn.metrics import roc_auc_score

    scores, targets = torch.linspace(0.5, 0.5 + 1e-6, 2048, dtype=torch.float64), torch.arange(2048) % 2
    metric = BinaryAUROC(num_bins=4)
    metric.update(scores, targets)
    assert compute_metrics({"a": metric}, None) == {"a/value": roc_auc_score(targets, scores), "a/error_bound": 0.0}
    metric.update(scores[:2], targets[:2])
    assert metric.compute()["error_bound"].item() > 0.1
