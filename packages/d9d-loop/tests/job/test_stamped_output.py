"""Lines of a process that is no terminal have time and rank, also those after the job and of logging."""

import io
import re
import subprocess
import sys
from pathlib import Path

import pytest

from d9d_loop.job.stamped_output import stamped_output

_STAMP = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d\d:\d\d rank 3 "
_SCRIPT = """
import logging, sys, warnings
logging.basicConfig(format="%(message)s")
print("before")
from d9d_loop.job.stamped_output import stamped_output
with stamped_output(3, enabled=True):
    print("step", 1)
print("between")
with stamped_output(3, enabled=True):
    print("a\\nb", file=sys.stderr)
    sys.stdout.writelines(["c\\n", "d\\u2028e\\n"])
    logging.warning("logged")
    warnings.warn("warned")
    raise KeyError("x")
"""


class _Stream(io.StringIO):
    def __init__(self, *, is_terminal: bool) -> None:
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


def _own(monkeypatch: pytest.MonkeyPatch, *, is_terminal: bool = False) -> _Stream:
    stream = _Stream(is_terminal=is_terminal)
    for name in ("stdout", "__stdout__"):
        monkeypatch.setattr(sys, name, stream)
    return stream


def test_each_line_of_a_job_and_of_its_traceback_has_time_and_rank(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(_SCRIPT)
    ended = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, encoding="utf-8", check=False
    )
    assert ended.returncode == 1
    assert re.fullmatch(rf"before\n{_STAMP}step 1\nbetween\n{_STAMP}c\n{_STAMP}d\u2028e\n", ended.stdout)
    lines = ended.stderr.removesuffix("\n").split("\n")
    assert all(re.match(_STAMP, line) for line in lines)
    texts = [re.sub(_STAMP, "", line) for line in lines]
    assert texts[:3] == ["a", "b", "logged"]
    assert "UserWarning: warned" in texts[3]
    assert texts[-1] == "KeyError: 'x'"


def test_a_terminal_has_no_stamps(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = _own(monkeypatch, is_terminal=True)
    with stamped_output(0, enabled=True):
        print("step 1")
    assert stream.getvalue() == "step 1\n"


def test_the_setting_removes_the_stamps_of_an_earlier_job(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = _own(monkeypatch)
    with pytest.raises(KeyError), stamped_output(0, enabled=True):
        raise KeyError
    with stamped_output(0, enabled=False):
        print("step 1")
    assert stream.getvalue() == "step 1\n"


def test_a_stream_of_the_caller_is_not_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    _own(monkeypatch)
    stream = _Stream(is_terminal=False)
    monkeypatch.setattr(sys, "stdout", stream)  # as in a notebook
    with stamped_output(0, enabled=True):
        print("step 1")
    assert stream.getvalue() == "step 1\n"
