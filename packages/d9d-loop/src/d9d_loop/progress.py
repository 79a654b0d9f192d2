"""Shows a person how far a job is; a bar on a terminal, single lines elsewhere."""

from collections.abc import Mapping

from tqdm import tqdm


class Progress:
    """A progress bar over the steps of a job, with the last values that were measured.

    Args:
        num_steps: Steps of the whole job.
        done: Steps done before.
        visible: Whether to show anything; only the main process does.
        bar: Whether to draw a bar, where the standard error is a terminal.
    """

    def __init__(self, *, num_steps: int, done: int, visible: bool, bar: bool) -> None:
        self._visible = visible
        self._num_steps = num_steps
        # disable=None leaves the bar out where there is no terminal.
        disable = None if visible and bar else True
        self._bar = tqdm(total=num_steps, initial=done, unit="step", dynamic_ncols=True, disable=disable)

    def step(self) -> None:
        """Count a step."""
        self._bar.update()

    def go_to(self, step: int) -> None:
        """Stand at another step."""
        self._bar.n = step
        self._bar.refresh()

    def values(self, step: int, values: Mapping[str, float]) -> None:
        """Show values of a step behind the bar, or on a line of their own where there is none. From any thread."""
        shown = {name: f"{value:.4g}" for name, value in values.items()}
        if self._bar.disable:
            self.line("  ".join([f"step {step}/{self._num_steps}:", *(f"{k} {v}" for k, v in shown.items())]))
        else:
            self._bar.set_postfix(shown, refresh=False)

    def line(self, text: str) -> None:
        """Print a line above the bar."""
        if self._visible:
            self._bar.write(text)

    def close(self) -> None:
        """Leave the bar as it is."""
        self._bar.close()
