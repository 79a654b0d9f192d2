import re
import sys

import pytest

from d9d_loop.job.stamped_output import stamped_output


def test_each_line_has_time_and_rank(capsys: pytest.CaptureFixture[str]) -> None:
    with stamped_output(3, enabled=True):
        print("step", 1)
        print("a\nb", file=sys.stderr, flush=True)
    print("after")
    out, err = capsys.readouterr()
    stamp = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d\d:\d\d rank 3 "
    assert re.fullmatch(rf"{stamp}step 1\nafter\n", out)
    assert re.fullmatch(rf"{stamp}a\n{stamp}b\n", err)


def test_a_terminal_has_no_stamps(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    with stamped_output(0, enabled=True):
        print("step 1")
    with stamped_output(0, enabled=False):
        print("step 2", file=sys.stderr)
    assert capsys.readouterr() == ("step 1\n", "step 2\n")
