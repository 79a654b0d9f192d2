"""How rotary frequencies are changed so that a model reads sequences longer than those that it was first trained on.

Each scaling is a frozen dataclass: what it makes of the frequencies `theta ** (-2 i / rotary_dim)` is its one method.

Shape legend: R rotated pairs, half the rotated features.
"""

import math
from dataclasses import dataclass
from typing import Literal, Protocol, final

import torch
from torch import Tensor

from d9d_dist.errors import UserError


class RotaryScaling(Protocol):
    """The frequencies of rotary positions, and what their cosines and sines are multiplied by."""

    @property
    def attention_factor(self) -> float:
        """Multiplies cosine and sine, and so queries and keys each; scores grow by its square."""
        ...

    def frequencies(self, theta: float, *, rotary_dim: int, length: Tensor) -> Tensor:
        """Angle between neighbouring positions [R], float32, in radians.

        Args:
            theta: Base of the geometric series of wavelengths.
            rotary_dim: Number of rotated features, 2 R.
            length: Length of the longest sequence, a scalar on the device of the result.
        """
        ...


def plain_frequencies(theta: float | Tensor, *, rotary_dim: int, device: torch.device) -> Tensor:
    """`theta ** (-2 i / rotary_dim)` [R] in float32: "RoFormer" (arXiv:2104.09864), section 3.2.2."""
    exponents_R = torch.arange(0, rotary_dim, 2, device=device).float() / rotary_dim
    return 1.0 / theta**exponents_R


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LinearScaling:
    """Positions closer together by a factor: "Position Interpolation" (arXiv:2306.15595), equation 4.

    Attributes:
        kind: Tells the scalings apart in a configuration.
        factor: How many times longer sequences become; above 0.

    Raises:
        UserError: If the factor is not above 0.
    """

    kind: Literal["linear"] = "linear"
    factor: float

    def __post_init__(self) -> None:
        """Refuse factors that no scaling can have."""
        _require_positive(self, factor=self.factor)

    @property
    def attention_factor(self) -> float:
        """See `RotaryScaling`; 1."""
        return 1.0

    def frequencies(self, theta: float, *, rotary_dim: int, length: Tensor) -> Tensor:
        """See `RotaryScaling`."""
        return plain_frequencies(theta, rotary_dim=rotary_dim, device=length.device) / self.factor


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicNtkScaling:
    """A base that grows with the length beyond the first training: YaRN (arXiv:2309.00071), sections 3.1 and 3.3.

    As `transformers` has it: `theta * (factor * length / original - (factor - 1)) ** (rotary_dim / (rotary_dim - 2))`.

    Attributes:
        kind: Tells the scalings apart in a configuration.
        factor: How strongly the base grows; above 0.
        original_max_positions: Longest sequence of the first training; shorter ones are not scaled.

    Raises:
        UserError: If a value is not above 0.
    """

    kind: Literal["dynamic"] = "dynamic"
    factor: float
    original_max_positions: int

    def __post_init__(self) -> None:
        """Refuse values that no scaling can have."""
        _require_positive(self, factor=self.factor, original_max_positions=self.original_max_positions)

    @property
    def attention_factor(self) -> float:
        """See `RotaryScaling`; 1."""
        return 1.0

    def frequencies(self, theta: float, *, rotary_dim: int, length: Tensor) -> Tensor:
        """See `RotaryScaling`.

        Raises:
            UserError: If there are only 2 rotated features, for which the base is not defined.
        """
        if rotary_dim <= 2:
            raise UserError(f"{rotary_dim} rotated features with dynamic NTK scaling; expected at least 4.")
        growth = self.factor * length.clamp(min=self.original_max_positions) / self.original_max_positions
        base = theta * (growth - (self.factor - 1)) ** (rotary_dim / (rotary_dim - 2))
        return plain_frequencies(base, rotary_dim=rotary_dim, device=length.device)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class YarnScaling:
    """Long wavelengths are interpolated, short ones are kept: "YaRN" (arXiv:2309.00071), section 3.2 and equation 22.

    Attributes:
        kind: Tells the scalings apart in a configuration.
        factor: How many times longer sequences become; above 0.
        original_max_positions: Longest sequence of the first training.
        beta_fast: Wavelengths that turn at least this often within it are kept (the paper's beta).
        beta_slow: Those that turn at most this often are interpolated fully (its alpha).
        mscale: Weight of the temperature's logarithm (DeepSeek-V2, arXiv:2405.04434); 0 for the paper's temperature.
        mscale_all_dim: The same weight of what it is divided by; 0 for the paper's temperature.
        fixed_attention_factor: Takes the place of the one computed from the factor; None computes it.
        truncate: Whether the two borders are rounded to whole pairs, outwards.

    Raises:
        UserError: If a value is not above 0, or `beta_fast` is below `beta_slow`.
    """

    kind: Literal["yarn"] = "yarn"
    factor: float
    original_max_positions: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    fixed_attention_factor: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        """Refuse values that no scaling can have."""
        _require_positive(
            self,
            factor=self.factor,
            original_max_positions=self.original_max_positions,
            beta_fast=self.beta_fast,
            beta_slow=self.beta_slow,
        )
        if self.beta_fast < self.beta_slow:
            raise UserError(
                f"beta_fast = {self.beta_fast}, beta_slow = {self.beta_slow}; expected the fast one to be the larger."
            )

    @property
    def attention_factor(self) -> float:
        """See `RotaryScaling`; the square root of 1/t in equation 22."""
        if self.fixed_attention_factor is not None:
            return self.fixed_attention_factor
        if self.mscale and self.mscale_all_dim:
            return self.temperature(self.mscale) / self.temperature(self.mscale_all_dim)
        return self.temperature(1.0)

    def temperature(self, weight: float) -> float:
        """`0.1 * weight * ln(factor) + 1`, equation 22 for a weight of 1; 1 where nothing is lengthened.

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
        width = high - low or 0.001  # as transformers and the paper's code have it where both borders are one
        ramp_R = ((torch.arange(rotary_dim // 2, device=length.device).float() - low) / width).clamp(0, 1)
        return kept_R / self.factor * ramp_R + kept_R * (1 - ramp_R)

    def _pair_that_turns(self, turns: float, theta: float, rotary_dim: int) -> float:
        """Index of the pair that turns so often within the original length."""
        return rotary_dim * math.log(self.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(theta))


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Scaling:
    """Wavelengths are divided by length into kept, interpolated and in between: Llama 3.1 (arXiv:2407.21783, 3.4.2).

    The formula is that of the released model code; the paper has only the larger base.

    Attributes:
        kind: Tells the scalings apart in a configuration.
        factor: How many times longer sequences become; above 0.
        low_freq_factor: Wavelengths above `original_max_positions / low_freq_factor` are interpolated fully.
        high_freq_factor: Wavelengths below `original_max_positions / high_freq_factor` are kept.
        original_max_positions: Longest sequence of the first training.

    Raises:
        UserError: If a value is not above 0, or `high_freq_factor` is not above `low_freq_factor`.
    """

    kind: Literal["llama3"] = "llama3"
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int

    def __post_init__(self) -> None:
        """Refuse values that no scaling can have."""
        _require_positive(
            self,
            factor=self.factor,
            low_freq_factor=self.low_freq_factor,
            high_freq_factor=self.high_freq_factor,
            original_max_positions=self.original_max_positions,
        )
        if self.high_freq_factor <= self.low_freq_factor:
            raise UserError(
                f"low_freq_factor = {self.low_freq_factor}, high_freq_factor = {self.high_freq_factor}; expected the "
                "high one to be the larger."
            )

    @property
    def attention_factor(self) -> float:
        """See `RotaryScaling`; 1."""
        return 1.0

    def frequencies(self, theta: float, *, rotary_dim: int, length: Tensor) -> Tensor:
        """See `RotaryScaling`."""
        kept_R = plain_frequencies(theta, rotary_dim=rotary_dim, device=length.device)
        turns_R = self.original_max_positions * kept_R / (2 * math.pi)
        share_R = (turns_R - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        share_R = share_R.clamp(0, 1)
        return kept_R / self.factor * (1 - share_R) + kept_R * share_R


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LongRopeScaling:
    """Each frequency is divided by a factor of its own, found by search: "LongRoPE" (arXiv:2402.13753), section 3.

    Attributes:
        kind: Tells the scalings apart in a configuration.
        short_factors: R factors, for sequences up to `original_max_positions`.
        long_factors: R factors, for longer ones.
        factor: How many times longer sequences become; decides the attention factor.
        original_max_positions: Longest sequence of the first training; above 1.
        fixed_attention_factor: Takes the place of the one computed from the factor; None computes it.

    Raises:
        UserError: If there are not equally many short and long factors, or a value is not above 0.
    """

    kind: Literal["longrope"] = "longrope"
    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    factor: float
    original_max_positions: int
    fixed_attention_factor: float | None = None

    def __post_init__(self) -> None:
        """Refuse values that no scaling can have."""
        _require_positive(
            self,
            factor=self.factor,
            original_max_positions=self.original_max_positions,
            short_factors=min(self.short_factors, default=0.0),
            long_factors=min(self.long_factors, default=0.0),
        )
        if self.original_max_positions < 2:
            raise UserError(
                f"LongRopeScaling got original_max_positions = {self.original_max_positions}; expected above 1, of "
                "which the logarithm scales attention."
            )
        if len(self.short_factors) != len(self.long_factors):
            raise UserError(
                f"{len(self.short_factors)} short_factors and {len(self.long_factors)} long_factors; expected one of "
                "each for every rotated pair."
            )

    @property
    def attention_factor(self) -> float:
        """See `RotaryScaling`; `sqrt(1 + ln(factor) / ln(original_max_positions))`."""
        if self.fixed_attention_factor is not None:
            return self.fixed_attention_factor
        return 1.0 if self.factor <= 1 else math.sqrt(1 + math.log(self.factor) / math.log(self.original_max_positions))

    def frequencies(self, theta: float, *, rotary_dim: int, length: Tensor) -> Tensor:
        """See `RotaryScaling`.

        Raises:
            UserError: If there is not one factor for each rotated pair.
        """
        if len(self.short_factors) != rotary_dim // 2:
            raise UserError(
                f"{len(self.short_factors)} factors of LongRoPE for {rotary_dim} rotated features; expected one for "
                f"each pair of features, {rotary_dim // 2}."
            )
        short_R, long_R = (
            torch.tensor(factors, dtype=torch.float32, device=length.device)
            for factors in (self.short_factors, self.long_factors)
        )
        factors_R = torch.where(length > self.original_max_positions, long_R, short_R)
        return plain_frequencies(theta, rotary_dim=rotary_dim, device=length.device) / factors_R


def _require_positive(scaling: RotaryScaling, **values: float) -> None:
    for name, value in values.items():
        if not value > 0:  # NaN is not
            raise UserError(f"{type(scaling).__name__} got {name} = {value}; expected above 0.")
