"""Progress display of a job: one live line on a terminal or some lines in a log file, and a table of evaluations."""

import time
from collections.abc import Mapping
from datetime import timedelta

import torch
from tqdm import tqdm

from d9d_metrics.peak_memory import peak_bytes

_HIDDEN = ("learning_rate", "grad_norm", "peak_memory_gib")
"""Values that the progress bar omits; the trackers and the report have them."""

_GIB = 2**30

_UNITS = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"))
"""Units of FLOP/s."""


class Progress:
    """Progress bar over the steps of a job, with the last reported values.

    The bar shows the step, the steps per second, elapsed and remaining time, the values, and the peak memory of this
    process. Without a bar, each call of `values` prints a line, with the elapsed and the remaining time.

    Args:
        num_steps: Number of steps of the whole job.
        done: Number of steps completed before this run.
        visible: If True, show progress; True only on the main process.
        bar: If True and standard error is a terminal, draw a bar; otherwise print the values as lines.
    """

    def __init__(self, *, num_steps: int, done: int, visible: bool, device: torch.device, bar: bool) -> None:
        self._device = device
        self._visible, self._num_steps = visible, num_steps
        self._start, self._done = time.monotonic(), done
        self._columns: list[str] = []
        # With disable=None, tqdm draws no bar if standard error is not a terminal.
        disable = None if visible and bar else True
        self._bar = tqdm(total=num_steps, initial=done, unit="step", dynamic_ncols=True, disable=disable)

    def step(self) -> None:
        """Advance the bar by one step."""
        self._bar.update()

    def go_to(self, step: int) -> None:
        """Set the bar to a number of completed steps."""
        self._bar.n = step
        self._bar.refresh()

    def values(self, step: int, values: Mapping[str, float]) -> None:
        """Show the values of a step next to the bar, or on a line if there is no bar. Thread-safe."""
        values = dict(values)
        speed = _speed(values.pop("flops_per_second", None), values.pop("mfu", None))
        if self._bar.disable:
            self._print_values(step, values, speed)
        else:
            known = {name: f"{value:.4g}" for name, value in values.items() if name not in _HIDDEN}
            self._bar.set_postfix(
                {**known, **speed, "memory": f"{peak_bytes(self._device) / _GIB:.1f}GiB"}, refresh=False
            )

    def evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """Print a row of the evaluation table, after a header if the names of the values changed."""
        if list(values) != self._columns:
            self._columns = list(values)
            self.line(_row("held-out", self._columns))
        self.line(_row(f"step {step}", [f"{value:.4f}" for value in values.values()]))

    def line(self, text: str) -> None:
        """Print a line of text above the bar."""
        if self._visible:
            self._bar.write(text)

    def close(self) -> None:
        """Close the bar and leave it on the terminal."""
        self._bar.close()

    def _print_values(self, step: int, values: Mapping[str, float], speed: Mapping[str, str]) -> None:
        elapsed, num_steps = time.monotonic() - self._start, step - self._done
        times = [f"{_duration(elapsed)} elapsed"]
        if num_steps > 0:
            times.append(f"{_duration(elapsed / num_steps * (self._num_steps - step))} remaining")
        shown = [f"{name} {value:.4g}" for name, value in values.items()]
        if speed:
            shown.append(", ".join(f"{name} {value}" for name, value in speed.items()))
        self.line("  ".join([f"step {step}/{self._num_steps}:", *shown, ", ".join(times)]))


def _speed(flops_per_second: float | None, mfu: float | None) -> dict[str, str]:
    """Format the speed, such as `12.3 TFLOP/s` and `41 %`, by name."""
    shown = {}
    if flops_per_second is not None:
        factor, unit = next((each for each in _UNITS if flops_per_second >= each[0]), _UNITS[-1])
        shown["speed"] = f"{flops_per_second / factor:.3g} {unit}FLOP/s"
    if mfu is not None:
        shown["MFU"] = f"{100 * mfu:.3g} %"
    return shown


def _duration(seconds: float) -> str:
    """Format a time in hours, minutes and seconds."""
    return str(timedelta(seconds=round(seconds)))


def _row(first: str, cells: list[str]) -> str:
    return "  ".join([f"{first:>12}", *(f"{cell:>14}" for cell in cells)])
