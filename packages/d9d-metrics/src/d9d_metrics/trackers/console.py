"""Console tracker: one aligned line per step."""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal, final

from pydantic import BaseModel, ConfigDict, JsonValue

from d9d_metrics.trackers.background import BackgroundTracker
from d9d_metrics.trackers.tracker import Tracker
from d9d_metrics.trackers.values import Media, Text, Tracked

_STEP_WIDTH = 8
_VALUE_WIDTH = 11


def _print_line(line: str) -> None:
    """Write a line to standard output at once, so that lines that other threads print do not mix with this one."""
    sys.stdout.write(f"{line}\n")  # `print` writes the newline separately
    sys.stdout.flush()  # Python buffers output to a pipe


@final
class ConsoleTracker(Tracker):
    """Tracker that writes lines like `step       10  loss     2.50000`, with fixed-width columns; no configuration."""

    def __init__(self, write: Callable[[str], object] = _print_line) -> None:
        """Set the function that writes a line without newline; `tqdm.write` keeps a progress bar intact."""
        self._write = write

    def resume(self, step: int, state: Mapping[str, JsonValue] = {}) -> None:
        """Write the step that the run resumes from; earlier lines stay as they are."""
        if step > 0:
            self._write(f"resumed after step {step}")

    def log(self, step: int, values: Mapping[str, Tracked]) -> None:
        """Write one line with the numbers, and one line per text; other values are skipped."""
        start = f"step {step:>{_STEP_WIDTH}}"
        numbers = {name: value for name, value in values.items() if not isinstance(value, Media)}
        columns = [f"{name} {value:>#{_VALUE_WIDTH}.6g}" for name, value in numbers.items()]
        if columns or not values:
            self._write("  ".join([start, *columns]))
        for name, value in values.items():
            if isinstance(value, Text):
                self._write(f"{start}  {name}: {value.text}")


@final
class ConsoleTrackerConfig(BaseModel):
    """Configuration of a tracker that prints to standard output."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["console"] = "console"

    def build(self, run_dir: Path) -> BackgroundTracker:
        """Create the tracker; it writes no files to the run folder."""
        return BackgroundTracker(ConsoleTracker, name=self.kind)
