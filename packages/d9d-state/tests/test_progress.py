import io
import sys

import pytest

from d9d_state._progress import byte_bar


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "visible", "shows"), [(_Terminal, True, True), (_Terminal, False, False), (io.StringIO, True, False)]
)
def test_bar_is_shown_on_terminals_if_requested(
    monkeypatch: pytest.MonkeyPatch, stream: type[io.StringIO], visible: bool, shows: bool
) -> None:
    terminal = stream()
    monkeypatch.setattr(sys, "stderr", terminal)
    with byte_bar("loading", 3_000_000, visible=visible) as bar:
        bar.update(1_500_000)
        bar.refresh()
    written = terminal.getvalue()
    assert ("loading:  50%" in written and "1.50M/3.00M" in written) == shows
    assert bool(written) == shows
