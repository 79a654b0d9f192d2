"""Progress display of a job: a bar on a terminal, otherwise lines."""

from collections.abc import Mapping

from tqdm import tqdm


class Progress:
    """Progress bar over the steps of a job, with the last reported values.

    Args:
        num_steps: Number of steps of the whole job.
        done: Number of steps completed before this run.
        visible: If True, show progress; True only on the main process.
        bar: If True and standard error is a terminal, draw a bar; otherwise print the values as lines.
    """

    def __init__(self, *, num_steps: int, done: int, visible: bool, bar: bool) -> None:
        self._visible = visible
        self._num_steps = num_steps
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
        shown = {name: f"{value:.4g}" for name, value in values.items()}
        if self._bar.disable:
            self.line("  ".join([f"step {step}/{self._num_steps}:", *(f"{k} {v}" for k, v in shown.items())]))
        else:
            self._bar.set_postfix(shown, refresh=False)

    def line(self, text: str) -> None:
        """Print a line of text above the bar."""
        if self._visible:
            self._bar.write(text)

    def close(self) -> None:
        """Close the bar and leave it on the terminal."""
        self._bar.close()
