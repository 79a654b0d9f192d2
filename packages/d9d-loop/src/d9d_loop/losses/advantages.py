"""Advantages from the rewards of sampled answers, relative to other answers of the same prompt or of the batch.

Shape legend: S answers of this rank, G prompts.
"""

from typing import Literal, TypeAlias, assert_never

import torch
import torch.distributed as dist
from torch import Tensor

from d9d_dist import UserError
from d9d_dist.errors import check_choice

Baseline: TypeAlias = Literal["group_mean", "leave_one_out", "none"]
"""Value that is subtracted from a reward."""

AdvantageScale: TypeAlias = Literal["group_std", "batch_std", "none"]
"""Value by which the reward minus the baseline is divided."""


def normalize_advantages(
    rewards_S: Tensor,
    prompt_ids_S: Tensor,
    *,
    num_prompts: int,
    baseline: Baseline = "group_mean",
    scale: AdvantageScale = "group_std",
    epsilon: float = 1e-4,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    r"""Return the advantage of each answer [S], in at least float32, without gradient.

    | method | baseline | scale |
    | --- | --- | --- |
    | GRPO (arXiv:2402.03300, section 4.1.2) | `group_mean` | `group_std` |
    | Dr. GRPO (arXiv:2503.20783, section 3.2) | `group_mean` | `none` |
    | RLOO (arXiv:2402.14740, equation 7) | `leave_one_out` | `none` |
    | REINFORCE++ (arXiv:2501.03262, section 3) | `none` | `batch_std` |
    | REINFORCE++ with baseline (the same) | `group_mean` | `batch_std` |

    `group_std` needs a baseline: without one, rewards that are equal for a prompt would be divided by `epsilon` alone.
    `batch_std` also subtracts the mean of the batch. Standard deviations of n values have the divisor n - 1. The
    answers of a prompt may be on several ranks. Differences to a mean that are mere rounding count as 0, so equal
    rewards give advantage 0 at any magnitude. A NaN reward gives NaN for its prompt, so the step is bad.

    Collectives over `group`: at most four all-reduces of G values, and with `batch_std` three all-reduces of a scalar.

    Args:
        rewards_S: Reward of each answer of this rank [S].
        prompt_ids_S: Prompt of each answer [S], int64, from 0 to G - 1, numbered over all ranks of `group`.
        num_prompts: Number of prompts G of the whole batch.
        baseline: Value that is subtracted from a reward: the mean over the prompt's answers, or over its other answers.
        scale: Value by which the reward minus the baseline is divided.
        epsilon: Added to standard deviations.
        group: Ranks that hold the answers of the batch: the data-parallel ranks. None if this rank holds all of them.

    Raises:
        UserError: If an option is unknown, `epsilon` is negative, `group_std` has no baseline, the shapes differ, or a
            prompt id on the CPU is out of range. Also if several ranks run without `group`, and this rank has no answer
            of a prompt.
    """
    check_choice("baseline", baseline, Baseline)
    check_choice("scale", scale, AdvantageScale)
    if not epsilon >= 0.0:
        raise UserError(f"epsilon = {epsilon}; expected 0 or more, such as 1e-4.")
    if baseline == "none" and scale == "group_std":
        raise UserError(
            'baseline = "none" with scale = "group_std" would divide rewards that are equal for a prompt by epsilon '
            'alone; expected baseline = "group_mean" or "leave_one_out", or scale = "batch_std" or "none".'
        )
    if rewards_S.shape != prompt_ids_S.shape or rewards_S.dim() != 1:
        raise UserError(
            f"rewards have shape {tuple(rewards_S.shape)} and prompt ids {tuple(prompt_ids_S.shape)}; expected shape "
            "[S] for both, with one element per answer."
        )
    if prompt_ids_S.device.type == "cpu" and ((prompt_ids_S < 0) | (prompt_ids_S >= num_prompts)).any():
        raise UserError(f"a prompt id is out of range; expected 0 to num_prompts - 1 = {num_prompts - 1}.")
    if group is None and prompt_ids_S.device.type == "cpu":
        _check_all_here(prompt_ids_S, num_prompts)
    values_S = rewards_S.detach().double()
    sums = _Sums(prompt_ids_S, num_prompts, group)
    counts_S = sums.of_prompts(torch.ones_like(values_S))
    values_S = _subtract_baseline(values_S, baseline, sums, counts_S)
    advantages_S = _divide_by_scale(values_S, scale, sums, counts_S, epsilon=epsilon)
    return advantages_S.to(torch.promote_types(rewards_S.dtype, torch.float32))


def _check_all_here(prompt_ids_S: Tensor, num_prompts: int) -> None:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    missing = sorted(set(range(num_prompts)) - set(prompt_ids_S.tolist()))
    if missing:
        raise UserError(
            f"group = None, but this rank has no answer of {len(missing)} of {num_prompts} prompts, such as prompt "
            f"{missing[0]}; expected the answers of all prompts, or a group. Pass group=ctx.group_for('batch', 'dp') "
            "if the data-parallel ranks hold the answers of the batch, or number only the prompts of this rank."
        )


def _difference(values_S: Tensor, mean: Tensor, count: Tensor) -> Tensor:
    """Return the values minus a mean of `count` values; 0 where the difference is not larger than rounding."""
    difference_S = values_S - mean
    rounding = 2.0 * torch.finfo(values_S.dtype).eps * count * mean.abs()
    is_zero_S = (difference_S.abs() <= rounding) & mean.isfinite()  # NaN stays NaN
    return torch.where(is_zero_S, 0.0, difference_S)


def _quotient(values_S: Tensor, scale: Tensor) -> Tensor:
    """Return the values divided by a scale; 0 for a value of 0, also if the scale is 0."""
    return torch.where(values_S == 0, 0.0, values_S / scale)


def _subtract_baseline(values_S: Tensor, baseline: Baseline, sums: "_Sums", counts_S: Tensor) -> Tensor:
    match baseline:
        case "group_mean":
            return _difference(values_S, sums.of_prompts(values_S) / counts_S, counts_S)
        case "leave_one_out":
            # If a prompt has a single answer, there is no other answer to compare with, so the advantage is 0.
            others_S = (sums.of_prompts(values_S) - values_S) / (counts_S - 1.0).clamp(min=1.0)
            return torch.where(counts_S > 1, _difference(values_S, others_S, counts_S), 0.0)
        case "none":
            return values_S
        case _:
            assert_never(baseline)


def _divide_by_scale(
    values_S: Tensor, scale: AdvantageScale, sums: "_Sums", counts_S: Tensor, *, epsilon: float
) -> Tensor:
    match scale:
        case "group_std":
            mean_S = sums.of_prompts(values_S) / counts_S
            squares_S = _difference(values_S, mean_S, counts_S).square()
            variance_S = sums.of_prompts(squares_S) / (counts_S - 1.0).clamp(min=1.0)
            return _quotient(values_S, variance_S.sqrt() + epsilon)
        case "batch_std":
            count = sums.of_batch(torch.ones_like(values_S))
            values_S = _difference(values_S, sums.of_batch(values_S) / count, count)
            variance = sums.of_batch(values_S.square()) / (count - 1.0).clamp(min=1.0)
            return _quotient(values_S, variance.sqrt() + epsilon)
        case "none":
            return values_S
        case _:
            assert_never(scale)


class _Sums:
    """Sums over the answers of a prompt or of the batch, on all ranks."""

    def __init__(self, prompt_ids_S: Tensor, num_prompts: int, group: dist.ProcessGroup | None) -> None:
        self._ids_S, self._num_prompts, self._group = prompt_ids_S, num_prompts, group

    def of_prompts(self, values_S: Tensor) -> Tensor:
        """Return the sum over the answers of the same prompt, for each answer [S]."""
        sums_G = values_S.new_zeros(self._num_prompts).scatter_add(0, self._ids_S, values_S)
        return self._over_ranks(sums_G)[self._ids_S]

    def of_batch(self, values_S: Tensor) -> Tensor:
        """Return the sum over all answers, a 0-dim tensor."""
        return self._over_ranks(values_S.sum())

    def _over_ranks(self, sums: Tensor) -> Tensor:
        if self._group is not None:
            dist.all_reduce(sums, group=self._group)
        return sums
