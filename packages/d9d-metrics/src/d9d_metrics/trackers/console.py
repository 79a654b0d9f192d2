"""Shows a run's values to a person, one aligned line a step."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal, final

from pydantic import BaseModel, ConfigDict, JsonValue

from d9d_metrics.trackers.background import BackgroundTracker
from d9d_metrics.trackers.values import Histogram, Picture, Text, Tracked

_STEP_WIDTH = 8
_VALUE_WIDTH = 11


def _print_now(line: str) -> None:
    """Print without waiting for a full buffer, which a pipe would make of the output."""
    print(line, flush=True)


@final
class ConsoleTracker:
    """Writes a line such as `step       10  loss     2.50000`, of fixed width, so that a column stays a column."""

    def __init__(self, write: Callable[[str], object] = _print_now) -> None:
        """Write to the standard output, or elsewhere.

        Args:
            write: Shows one line, given without a newline; `tqdm.write` goes well with a progress bar.
        """
        self._write = write

    def resume(self, step: int, state: Mapping[str, JsonValue] = {}) -> None:
        """Say where the run goes on; what was written stays written."""
        if step > 0:
            self._write(f"resumed after step {step}")

    def log_config(self, config: Mapping[str, JsonValue]) -> None:
        """Show nothing: a person has the file."""

    def log(self, step: int, values: Mapping[str, Tracked]) -> None:
        """Write one line with the numbers, and one for each text; distributions and pictures are left out."""
        start = f"step {step:>{_STEP_WIDTH}}"
        numbers = {name: value for name, value in values.items() if not isinstance(value, Histogram | Text | Picture)}
        columns = [f"{name} {value:>#{_VALUE_WIDTH}.6g}" for name, value in numbers.items()]
        if columns or not values:
            self._write("  ".join([start, *columns]))
        for name, value in values.items():
            if isinstance(value, Text):
                self._write(f"{start}  {name}: {value.text}")

    def flush(self) -> None:
        """Do nothing: each line is out when `log` returns."""

    def state_dict(self) -> dict[str, JsonValue]:
        """Return nothing."""
        return {}

    def close(self) -> None:
        """Do nothing: each line is out when `log` returns."""


@final
class ConsoleTrackerConfig(BaseModel):
    """Chooses lines on the standard output.

    Attributes:
        kind: The word that chooses this tracker.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["console"] = "console"

    def check(self) -> None:
        """Do nothing: it needs no package."""

    def build(self, run_dir: Path) -> BackgroundTracker:
        """Make the tracker; it leaves nothing in the run's folder."""
        return BackgroundTracker(ConsoleTracker, name=self.kind)
