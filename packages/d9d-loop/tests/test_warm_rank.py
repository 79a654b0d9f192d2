import sys
from pathlib import Path
from unittest import mock

import pytest

from d9d_loop import warm_rank

# The test process may have imported the late modules already, or would need seconds to import them.
_imports_no_job = mock.patch.multiple(warm_rank, _LATE_IMPORTS=(), gc=mock.Mock())


@pytest.fixture(autouse=True)
def _same_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", list(sys.argv))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "only_here.py").write_text("value = 7\n", encoding="utf-8")
    text = "open('ran', 'w').close()\nimport missing_module\nfrom only_here import value, another\n"
    (tmp_path / "script.py").write_text(text, encoding="utf-8")
    return tmp_path


@_imports_no_job
@pytest.mark.parametrize("is_module", [False, True])
def test_the_imports_of_a_script_are_imported_and_the_script_is_not_run(
    is_module: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.delitem(sys.modules, "only_here", raising=False)
    warm_rank.import_for(["-m", "script"] if is_module else [str(folder / "script.py")])
    assert sys.modules["only_here"].value == 7
    assert not (folder / "ran").exists()


@_imports_no_job
@pytest.mark.parametrize("text", ["import (", None])
def test_a_script_with_a_mistake_is_left_to_the_ranks(text: str | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "script.py").write_text(text, encoding="utf-8")
    warm_rank.import_for([str(tmp_path / "script.py")])


@pytest.mark.parametrize("is_module", [False, True])
def test_a_rank_runs_the_command_with_its_arguments(
    is_module: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "beside.py").touch()
    text = "import sys, beside\nassert __name__ == '__main__'\nopen('ran', 'w').write(' '.join(sys.argv[1:]))\n"
    (tmp_path / "warm_script.py").write_text(text, encoding="utf-8")
    command = ["-m", "warm_script"] if is_module else [str(tmp_path / "warm_script.py")]
    with mock.patch("os.setsid"):
        warm_rank._run([*command, "--steps", "2"])
    assert (tmp_path / "ran").read_text(encoding="utf-8") == "--steps 2"


def test_a_rank_prints_its_traceback_and_exits_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "script.py").write_text("raise KeyError('mine')\n", encoding="utf-8")
    with mock.patch("os.setsid"), pytest.raises(SystemExit, match="1"):
        warm_rank._run([str(tmp_path / "script.py")])
    assert "KeyError: 'mine'" in capsys.readouterr().err
