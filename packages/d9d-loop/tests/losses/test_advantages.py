from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.testing import assert_close

from d9d_dist import UserError
from d9d_dist.testing import run_ranks
from d9d_loop.losses import AdvantageScale, Baseline, normalize_advantages

REWARDS = torch.tensor([1.0, 0.0, 3.0, 0.5, 2.0, 2.0, 2.0, 7.0], dtype=torch.float64)
PROMPTS = torch.tensor([0, 0, 0, 1, 1, 2, 2, 3])
BASELINES: tuple[Baseline, ...] = ("group_mean", "leave_one_out", "none")
SCALES: tuple[AdvantageScale, ...] = ("group_std", "batch_std", "none")
FORMS = [(baseline, scale) for baseline in BASELINES for scale in SCALES if (baseline, scale) != ("none", "group_std")]


def _expected(baseline: str, scale: str) -> Tensor:
    """Compute each advantage from its definition."""
    values = REWARDS.clone()
    for index, prompt in enumerate(PROMPTS):
        group = REWARDS[prompt == PROMPTS]
        others = torch.cat(
            [REWARDS[[i]] for i in range(8) if PROMPTS[i] == prompt and i != index] or [REWARDS[[index]]]
        )
        values[index] -= {"group_mean": group.mean(), "leave_one_out": others.mean(), "none": 0.0}[baseline]
    if scale == "batch_std":
        return (values - values.mean()) / (values.std() + 1e-4)
    stds = torch.stack([torch.nan_to_num(values[prompt == PROMPTS].std(), 0.0) for prompt in PROMPTS])
    return values / (stds + 1e-4) if scale == "group_std" else values


@pytest.mark.parametrize(("baseline", "scale"), FORMS)
@pytest.mark.filterwarnings("ignore:std")
def test_advantages_equal_their_definition(baseline: Baseline, scale: AdvantageScale) -> None:
    found = normalize_advantages(REWARDS, PROMPTS, num_prompts=4, baseline=baseline, scale=scale)
    assert_close(found, _expected(baseline, scale))


def _advantages_of_a_rank() -> list[Tensor]:
    group = init_device_mesh("cpu", (2,)).get_group()
    own = slice(None, 3) if group.rank() else slice(3, None)  # the ranks have parts of the same prompts, of other sizes
    order = torch.tensor([0, 3, 5, 1, 2, 4, 6, 7])[own]
    return [
        torch.stack(
            [
                order.double(),
                normalize_advantages(REWARDS[order], PROMPTS[order], num_prompts=4, baseline=b, scale=s, group=group),
            ]
        )
        for b, s in FORMS
    ]


@pytest.mark.filterwarnings("ignore:std")
def test_a_batch_on_several_ranks_has_the_same_advantages() -> None:
    parts = run_ranks(_advantages_of_a_rank, world_size=2)
    for (baseline, scale), *of_ranks in zip(FORMS, *parts, strict=True):
        order, values = torch.cat(of_ranks, dim=1)
        assert_close(values, _expected(baseline, scale)[order.long()], msg=f"{baseline}, {scale}")


def _forget_the_group() -> str:
    group = init_device_mesh("cpu", (2,)).get_group()
    own = 2 * group.rank() == PROMPTS
    with pytest.raises(UserError) as error:
        normalize_advantages(REWARDS[own], PROMPTS[own], num_prompts=4)
    normalize_advantages(REWARDS, PROMPTS, num_prompts=4)  # each rank holds all answers
    return str(error.value)


def test_a_forgotten_group_is_an_error() -> None:
    first, second = run_ranks(_forget_the_group, world_size=2)
    assert first.startswith("group = None, but this rank has no answer of 3 of 4 prompts, such as prompt 1; expected")
    assert "such as prompt 0; expected the answers of all prompts, or a group. Pass group=ctx" in second


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(UserError, match=r"a prompt id is out of range; expected 0 to num_prompts - 1 = 2"):
        normalize_advantages(REWARDS, PROMPTS, num_prompts=3)
    with pytest.raises(
        UserError, match=r'baseline = "none" with scale = "group_std" would divide .* expected baseline ='
    ):
        normalize_advantages(REWARDS, PROMPTS, num_prompts=4, baseline="none")
    with pytest.raises(UserError, match=r"rewards have shape \(8,\) and prompt ids \(2,\)"):
        normalize_advantages(REWARDS, PROMPTS[:2], num_prompts=3)


@pytest.mark.parametrize(("baseline", "scale"), [each for each in FORMS if each != ("none", "none")])
def test_equal_rewards_give_advantage_zero_at_any_magnitude(baseline: Baseline, scale: AdvantageScale) -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        for size in (2, 3, 6, 7, 10, 12, 33):
            for reward in (0.1, -7.3, 100.7, 7126.533, 1e12 / 3):
                rewards, ids = torch.full((size,), reward, dtype=dtype), torch.zeros(size, dtype=torch.int64)
                found = normalize_advantages(rewards, ids, num_prompts=1, baseline=baseline, scale=scale)
                assert found.eq(0).all(), (dtype, size, reward)
                assert found.dtype == torch.promote_types(dtype, torch.float32)


@pytest.mark.parametrize(("baseline", "scale"), FORMS)
def test_rewards_that_are_not_finite_give_no_advantage_of_zero(baseline: Baseline, scale: AdvantageScale) -> None:
    for reward in (torch.nan, torch.inf):
        rewards = REWARDS.clone()
        rewards[1] = reward
        found = normalize_advantages(rewards, PROMPTS, num_prompts=4, baseline=baseline, scale=scale)
        assert not found[1].isfinite()
        assert (baseline, scale) == ("none", "none") or not found[:3].isfinite().any()


@pytest.mark.parametrize(("baseline", "scale"), [each for each in FORMS if each != ("none", "none")])
def test_equal_rewards_give_advantage_zero_without_epsilon(baseline: Baseline, scale: AdvantageScale) -> None:
    for size in (1, 4):
        rewards, ids = torch.full((size,), 0.3), torch.zeros(size, dtype=torch.int64)
        found = normalize_advantages(rewards, ids, num_prompts=1, baseline=baseline, scale=scale, epsilon=0.0)
        assert found.eq(0).all()


def test_unknown_options_are_an_error() -> None:
    for options, message in (
        ({"baseline": "mean"}, "baseline = 'mean'; expected one of group_mean, leave_one_out, none"),
        ({"scale": "std"}, "scale = 'std'; expected one of group_std, batch_std, none"),
        ({"epsilon": -1.0}, r"epsilon = -1.0; expected 0 or more"),
        ({"epsilon": torch.nan}, r"epsilon = nan; expected 0 or more"),
    ):
        wrong: dict[str, Any] = options
        with pytest.raises(UserError, match=message):
            normalize_advantages(REWARDS, PROMPTS, num_prompts=4, **wrong)


def test_small_differences_of_large_rewards_count() -> None:
    rewards = torch.tensor([7126.5, 7126.5, 7126.501], dtype=torch.float64)
    found = normalize_advantages(rewards, torch.zeros(3, dtype=torch.int64), num_prompts=1)
    assert_close(found, (rewards - rewards.mean()) / (rewards.std() + 1e-4))
