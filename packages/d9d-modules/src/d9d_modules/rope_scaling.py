"""RoPE scalings, which extend a model to sequences longer than in its pretraining.

Shape legend: R rotated pairs, half the number of rotated features.
"""

import math
from abc import ABC
from dataclasses import dataclass, fields
from typing import Literal, Protocol, final

import torch
from torch import Tensor

from d9d_dist.errors import UserError


class RotaryScaling(Protocol):
    """Interface of a RoPE scaling: scaled frequencies and a factor for cosine and sine."""

    @property
    def attention_factor(self) -> float:
        """Multiplier of the cosine and sine tables. Attention scores scale with its square."""
        ...

    def frequencies(self, theta: float, *, rotary_dim: int, length: Tensor) -> Tensor:
        """Return the rotation angle per position of each pair [R], float32, in radians.

        `length` is the longest sequence length, a scalar tensor on the device of the result. `rotary_dim` is 2 R.
        """
        ...


def plain_frequencies(theta: float | Tensor, *, rotary_dim: int, device: torch.device) -> Tensor:
    """Return `theta ** (-2 i / rotary_dim)` [R] in float32: "RoFormer" (arXiv:2104.09864), section 3.2.2."""
    exponents_R = torch.arange(0, rotary_dim, 2, device=device).float() / rotary_dim
    return 1.0 / theta**exponents_R


@dataclass(frozen=True, kw_only=True)
class _Scaling(ABC):
    """Base class of the scalings below. All numbers are above 0, except for the weights of YaRN, which may be 0."""

    factor: float

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            least = min(value, default=0.0) if isinstance(value, tuple) else value
            is_number = type(least) in (int, float) and each.name not in {"mscale", "mscale_all_dim"}
            if is_number and not least > 0:  # also rejects NaN
                raise UserError(f"{type(self).__name__} got {each.name} = {least}; expected above 0.")

    @property
    def attention_factor(self) -> float:
        """See `RotaryScaling`."""
        return 1.0


@final
@dataclass(frozen=True, kw_only=True)
class LinearScaling(_Scaling):
    """Linear scaling, which divides all frequencies by a factor: "Position Interpolation" (arXiv:2306.15595), eq. 4.

    Attributes:
        factor: Ratio of the new to the pretraining sequence length.
    """

    kind: Literal["linear"] = "linear"

    def frequencies(self, theta: float, *, rotary_dim: int, length: Tensor) -> Tensor:
        """See `RotaryScaling`."""
        return plain_frequencies(theta, rotary_dim=rotary_dim, device=length.device) / self.factor


@final
@dataclass(frozen=True, kw_only=True)
class DynamicNtkScaling(_Scaling):
    """Dynamic NTK scaling, whose base grows with the sequence length: YaRN (arXiv:2309.00071), sections 3.1 and 3.3.

    The base is `theta * (1 + factor * (length - original) / original) ** (rotary_dim / (rotary_dim - 2))` for sequences
    longer than `original`, and `theta` for shorter sequences.

    Attributes:
        factor: Growth rate of the base.
        original_max_positions: Longest sequence of the pretraining, which is not scaled.
    """

    kind: Literal["dynamic"] = "dynamic"
    original_max_positions: int

    def frequencies(self, theta: float, *, rotary_dim: int, length: Tensor) -> Tensor:
        """See `RotaryScaling`; raises a `UserError` if `rotary_dim` is 2, for which the base is undefined."""
        excess = (length - self.original_max_positions).clamp(min=0)
        growth = 1 + self.factor * excess / self.original_max_positions  # a difference of two quotients loses precision
        base = theta * growth ** _ntk_exponent(rotary_dim)
        return plain_frequencies(base, rotary_dim=rotary_dim, device=length.device)


@final
@dataclass(frozen=True, kw_only=True)
class NtkScaling(_Scaling):
    """Static NTK scaling, which raises the base once: "NTK-aware", YaRN (arXiv:2309.00071), section 3.1, equation 16.

    The base is `theta * factor ** (rotary_dim / (rotary_dim - 2))`, so the lowest frequency is divided by `factor`.

    Attributes:
        factor: Ratio of the new to the pretraining sequence length.
    """

    kind: Literal["ntk"] = "ntk"

    def base(self, theta: float, *, rotary_dim: int) -> float:
        """Return the scaled base, as exported to a Hugging Face `config.json`; errors as in `DynamicNtkScaling`."""
        return theta * self.factor ** _ntk_exponent(rotary_dim)

    def frequencies(self, theta: float, *, rotary_dim: int, length: Tensor) -> Tensor:
        """See `RotaryScaling`; errors as in `base`."""
        return plain_frequencies(self.base(theta, rotary_dim=rotary_dim), rotary_dim=rotary_dim, device=length.device)


@final
@dataclass(frozen=True, kw_only=True)
class YarnScaling(_Scaling):
    """YaRN, which interpolates long wavelengths and keeps short ones (arXiv:2309.00071, section 3.2 and equation 22).

    Attributes:
        factor: Ratio of the new to the pretraining sequence length.
        original_max_positions: Longest sequence of the pretraining.
        beta_fast: Pairs with at least this many rotations within `original_max_positions` are kept (the paper's beta).
        beta_slow: Pairs with at most this many rotations are fully interpolated (the paper's alpha).
        mscale: Weight in the numerator of the attention factor, see `temperature` (DeepSeek-V2, arXiv:2405.04434).
            If `mscale` or `mscale_all_dim` is 0, the paper's attention factor is used.
        mscale_all_dim: Weight in the denominator of the attention factor.
        fixed_attention_factor: Overrides the computed attention factor; None computes it.
        truncate: If True, round the two boundaries outward to whole pairs.

    Raises:
        UserError: If a number is out of range, or `beta_fast` is below `beta_slow`.
    """

    kind: Literal["yarn"] = "yarn"
    original_max_positions: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    fixed_attention_factor: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.beta_fast < self.beta_slow:
            raise UserError(
                f"beta_fast = {self.beta_fast}, beta_slow = {self.beta_slow}; expected beta_fast >= beta_slow."
            )

    @property
    def attention_factor(self) -> float:
        """See `RotaryScaling`. By default sqrt(1/t) of equation 22."""
        if self.fixed_attention_factor is not None:
            return self.fixed_attention_factor
        if self.mscale and self.mscale_all_dim:
            return self.temperature(self.mscale) / self.temperature(self.mscale_all_dim)
        return self.temperature(1.0)

    def temperature(self, weight: float) -> float:
        """Return `0.1 * weight * ln(factor) + 1`, or 1 if `factor` is at most 1; weight 1 gives equation 22.

        DeepSeek multiplies the softmax scale of its attention by the square of `temperature(mscale_all_dim)`.
        """
        return 1.0 if self.factor <= 1 else 0.1 * weight * math.log(self.factor) + 1.0

    def frequencies(self, theta: float, *, rotary_dim: int, length: Tensor) -> Tensor:
        """See `RotaryScaling`."""
        kept_R = plain_frequencies(theta, rotary_dim=rotary_dim, device=length.device)
        low, high = (self._pair_that_turns(turns, theta, rotary_dim) for turns in (self.beta_fast, self.beta_slow))
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, rotary_dim - 1)
        width = high - low or 0.001  # if both boundaries coincide; same value as transformers and the paper's code
        ramp_R = ((torch.arange(rotary_dim // 2, device=length.device).float() - low) / width).clamp(0, 1)
        return kept_R / self.factor * ramp_R + kept_R * (1 - ramp_R)

    def _pair_that_turns(self, turns: float, theta: float, rotary_dim: int) -> float:
        """Return the fractional index of the pair that makes `turns` rotations within `original_max_positions`."""
        return rotary_dim * math.log(self.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(theta))


@final
@dataclass(frozen=True, kw_only=True)
class Llama3Scaling(_Scaling):
    """Llama 3.1 scaling: keeps short wavelengths, interpolates long ones, blends in between (arXiv:2407.21783, 3.4.2).

    The formula comes from the released model code; the paper mentions only the larger base.

    Attributes:
        factor: Ratio of the new to the pretraining sequence length.
        low_freq_factor: Wavelengths above `original_max_positions / low_freq_factor` are fully interpolated.
        high_freq_factor: Wavelengths below `original_max_positions / high_freq_factor` are kept.
        original_max_positions: Longest sequence of the pretraining.

    Raises:
        UserError: If a number is out of range, or `high_freq_factor` is not above `low_freq_factor`.
    """

    kind: Literal["llama3"] = "llama3"
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.high_freq_factor <= self.low_freq_factor:
            raise UserError(
                f"low_freq_factor = {self.low_freq_factor}, high_freq_factor = {self.high_freq_factor}; expected "
                "high_freq_factor > low_freq_factor."
            )

    def frequencies(self, theta: float, *, rotary_dim: int, length: Tensor) -> Tensor:
        """See `RotaryScaling`."""
        kept_R = plain_frequencies(theta, rotary_dim=rotary_dim, device=length.device)
        turns_R = self.original_max_positions * kept_R / (2 * math.pi)
        share_R = (turns_R - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        share_R = share_R.clamp(0, 1)
        return kept_R / self.factor * (1 - share_R) + kept_R * share_R


@final
@dataclass(frozen=True, kw_only=True)
class LongRopeScaling(_Scaling):
    """LongRoPE, which divides each frequency by a searched factor (arXiv:2402.13753, section 3).

    Attributes:
        short_factors: R factors for sequences up to `original_max_positions`.
        long_factors: R factors for longer sequences.
        factor: Ratio of the new to the pretraining sequence length; determines the attention factor.
        original_max_positions: Longest sequence of the pretraining; above 1.
        fixed_attention_factor: Overrides the attention factor computed from `factor`; None computes it.

    Raises:
        UserError: If `short_factors` and `long_factors` differ in length, or a value is out of range.
    """

    kind: Literal["longrope"] = "longrope"
    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    original_max_positions: int
    fixed_attention_factor: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.original_max_positions < 2:
            raise UserError(
                f"LongRopeScaling got original_max_positions = {self.original_max_positions}; expected at least 2: "
                "the attention factor divides by its logarithm."
            )
        if len(self.short_factors) != len(self.long_factors):
            raise UserError(
                f"got {len(self.short_factors)} short_factors and {len(self.long_factors)} long_factors; expected one "
                "of each per rotated pair."
            )

    @property
    def attention_factor(self) -> float:
        """See `RotaryScaling`. By default `sqrt(1 + ln(factor) / ln(original_max_positions))`."""
        if self.fixed_attention_factor is not None:
            return self.fixed_attention_factor
        return 1.0 if self.factor <= 1 else math.sqrt(1 + math.log(self.factor) / math.log(self.original_max_positions))

    def frequencies(self, theta: float, *, rotary_dim: int, length: Tensor) -> Tensor:
        """See `RotaryScaling`.

        Raises:
            UserError: If the number of factors is not `rotary_dim / 2`.
        """
        if len(self.short_factors) != rotary_dim // 2:
            raise UserError(
                f"LongRopeScaling has {len(self.short_factors)} factors for {rotary_dim} rotated features; expected "
                f"one per pair of features, {rotary_dim // 2}. In config.json, short_factor and long_factor of "
                "rope_parameters must match head_dim and partial_rotary_factor."
            )
        short_R, long_R = (
            torch.tensor(factors, dtype=torch.float32, device=length.device)
            for factors in (self.short_factors, self.long_factors)
        )
        factors_R = torch.where(length > self.original_max_positions, long_R, short_R)
        return plain_frequencies(theta, rotary_dim=rotary_dim, device=length.device) / factors_R


def _ntk_exponent(rotary_dim: int) -> float:
    if rotary_dim <= 2:
        raise UserError(f"{rotary_dim} rotated features with NTK scaling; expected at least 4.")
    return rotary_dim / (rotary_dim - 2)
