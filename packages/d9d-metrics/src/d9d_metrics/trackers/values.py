"""What a tracker takes besides numbers: distributions, text and pictures, in forms that fit in a file of JSON."""

import base64
import io
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, final

import torch
from pydantic import JsonValue
from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@final
@dataclass(frozen=True, slots=True)
class Histogram:
    """How values are distributed: the number of them in each of some bins of equal width.

    Attributes:
        low: Lower edge of the first bin.
        high: Upper edge of the last bin.
        counts: Number of values in each bin.
    """

    low: float
    high: float
    counts: tuple[float, ...]

    @staticmethod
    def of(values: Tensor, *, num_bins: int = 64) -> "Histogram":
        """Count the finite elements of a tensor between the smallest and the largest one; waits for its device.

        Args:
            values: Of any shape and real dtype; this process's part, if it is a DTensor's.
            num_bins: Number of bins.
        """
        flat = values.detach().reshape(-1).to("cpu", torch.float64)
        flat = flat[flat.isfinite()]
        low, high = (flat.min().item(), flat.max().item()) if flat.numel() > 0 else (0.0, 0.0)
        # A single value gets bins around it: an interval has a width.
        low, high = (low, high) if low < high else (low - 0.5, high + 0.5)
        return Histogram(low, high, tuple(torch.histc(flat, num_bins, low, high).tolist()))

    @property
    def edges(self) -> tuple[float, ...]:
        """The edges of the bins, one more than there are bins."""
        width = (self.high - self.low) / len(self.counts)
        return (*(self.low + index * width for index in range(len(self.counts))), self.high)


@final
@dataclass(frozen=True, slots=True)
class Text:
    """Some text, for instance what a model wrote.

    Attributes:
        text: It.
    """

    text: str


@final
@dataclass(frozen=True, slots=True)
class Picture:
    """A picture.

    Attributes:
        png: The bytes of a PNG file.
    """

    png: bytes

    @staticmethod
    def of(figure: "Figure") -> "Picture":
        """Draw a figure of matplotlib as it is now."""
        file = io.BytesIO()
        figure.savefig(file, format="png")
        return Picture(file.getvalue())


Tracked: TypeAlias = float | Histogram | Text | Picture
"""What a value can be; most are numbers."""


def to_json(value: Tracked) -> JsonValue:
    """Give a value a form that JSON has, from which `from_json` makes it again.

    Numbers that JSON does not know are the strings `"nan"`, `"inf"` and `"-inf"`.
    """
    match value:
        case Histogram():
            return {"histogram": {"low": value.low, "high": value.high, "counts": list(value.counts)}}
        case Text():
            return {"text": value.text}
        case Picture():
            return {"png": base64.b64encode(value.png).decode()}
    number = float(value)
    return number if math.isfinite(number) else str(number)


def from_json(value: Any) -> Tracked:
    """Make a value of what `to_json` returned."""
    match value:
        case {"histogram": {"low": low, "high": high, "counts": counts}}:
            return Histogram(low, high, tuple(counts))
        case {"text": text}:
            return Text(text)
        case {"png": png}:
            return Picture(base64.b64decode(png))
    return float(value)
