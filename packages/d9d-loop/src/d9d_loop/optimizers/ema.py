"""Configuration of an exponential moving average (EMA) of the weights."""

from typing import Any, final

from pydantic import Field

from d9d_loop.section import Section


@final
class Ema(Section):
    """Exponential moving average of the weights, which evaluations and exports use.

    After step n, of those that are not skipped, average = d average + (1 - d) weights. d is `decay`, or with `warmup`
    min(decay, n / (9 + n)). The average of the first step is its weights.
    """

    decay: float = Field(default=0.999, ge=0, lt=1, description="Weight of the previous average, d.")
    warmup: bool = Field(
        default=False,
        description="Limit the decay in step n to n / (9 + n), so that the first steps count less: 0.52 in step 10, "
        "0.92 in step 100, 0.99 in step 1000.",
    )

    def __init__(self, decay: float = 0.999, **settings: Any) -> None:
        super().__init__(**{"decay": decay, **settings})
