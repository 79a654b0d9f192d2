"""Every Python snippet that a page or README shows is run: what the documentation says is what the packages do.

The python blocks of a page run in order and in one namespace, in a folder of their own. A block of any language with
`title="x.toml"` behind its language also lies in that folder as a file of this name. Functions named `test_*` are
called at the end, as pytest would. A block marked `python no-run` is left out, and its first line says why:
`# not run: ...`.
"""

import contextlib
import importlib.util
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[1]
GUIDES = sorted((ROOT / "docs").glob("*.md"))
PAGES = [*GUIDES, *sorted(ROOT.glob("packages/*/README.md")), *sorted(ROOT.glob("README.md"))]

_FENCE = re.compile(r"^(?P<indent>[ >]*)(?P<ticks>```+|~~~+)(?P<info>.*)$")
_TITLE = re.compile(r'\btitle="([^"]+)"')
_NO_RUN = "# not run: "
_MAIN_GUARD = 'if __name__ == "__main__":'


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of a page; `line` is the number of its first line within the page."""

    info: str
    code: str
    line: int

    @property
    def title(self) -> str | None:
        match = _TITLE.search(self.info)
        return None if match is None else match[1]

    @property
    def is_python(self) -> bool:
        return self.info.split()[:1] in (["python"], ["py"], ["python3"], ["pycon"])

    @property
    def runs(self) -> bool:
        return self.is_python and "no-run" not in self.info.split()


def blocks(text: str) -> list[Block]:
    """The fenced blocks of a page, in order.

    Raises:
        ValueError: If a block would silently escape: it is indented, never closed, or left out without a reason.
    """
    found: list[Block] = []
    fence: re.Match[str] | None = None
    lines: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        if fence is not None:
            if line.strip() != fence["ticks"]:
                lines.append(line)
                continue
            found.append(Block(fence["info"].strip(), "\n".join(lines) + "\n", number - len(lines)))
            fence, lines = None, []
        elif (fence := _FENCE.match(line)) and (fence["indent"] or fence["ticks"] != "```"):
            raise ValueError(f"line {number}: expected a fence of three backticks at the start of the line.")
    if fence is not None:
        raise ValueError(f"the block {fence['info']!r} is never closed.")
    for block in found:
        if block.is_python and not block.runs and not block.code.startswith(_NO_RUN):
            raise ValueError(f"line {block.line}: expected the reason for no-run, {_NO_RUN!r}..., as the first line.")
    return found


def run_page(page: Path, folder: Path) -> int:
    """Run the snippets of a page in `folder`; the number of blocks that ran. What a snippet raises is raised."""
    snippets = blocks(page.read_text(encoding="utf-8"))
    python = [block for block in snippets if block.runs]
    module, source = _module(page, python, folder)
    arguments = sys.argv
    sys.modules[module.__name__], sys.argv = module, [str(source)]
    try:
        with contextlib.chdir(folder):
            for block in snippets:
                if block.title is not None:
                    Path(block.title).parent.mkdir(parents=True, exist_ok=True)
                    Path(block.title).write_text(block.code, encoding="utf-8")
                if block.runs:
                    _run(block, module, source, page)
            for name in [name for name in vars(module) if name.startswith("test_")]:
                vars(module)[name]()
    finally:
        sys.argv = arguments
        del sys.modules[module.__name__]
    return len(python)


def _module(page: Path, python: list[Block], folder: Path) -> tuple[ModuleType, Path]:
    """An empty module for the page, and a file with its snippets on the lines where the page has them.

    Ranks in other processes find a page's functions by that file, and tracebacks show its lines.
    """
    lines: list[str] = []
    for block in python:
        lines += [""] * (block.line - 1 - len(lines)) + block.code.splitlines()
    name = re.sub(r"\W", "_", f"snippets_of_{page.parent.name}_{page.stem}")
    source = folder / f"{name}.py"
    source.write_text("\n".join(lines) + "\n", encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, source)
    assert spec is not None
    return importlib.util.module_from_spec(spec), source


def _run(block: Block, module: ModuleType, source: Path, page: Path) -> None:
    code = compile("\n" * (block.line - 1) + block.code, str(source), "exec", dont_inherit=True)
    # A script runs as one; everything else must be found by its module's name from other processes.
    name, vars(module)["__name__"] = module.__name__, "__main__" if _MAIN_GUARD in block.code else module.__name__
    try:
        exec(code, vars(module))  # noqa: S102  (our own documentation)
    except BaseException as error:
        error.add_note(f"in the snippet at {page}:{block.line}")
        raise
    finally:
        vars(module)["__name__"] = name


@pytest.mark.parametrize("page", PAGES, ids=[path.relative_to(ROOT).as_posix() for path in PAGES])
def test_snippets_run(page: Path, tmp_path: Path) -> None:
    num_run = run_page(page, tmp_path)
    assert num_run > 0 or page not in GUIDES, "every guide shows something that runs"
    assert not dist.is_initialized(), "a snippet left its process group running"


def test_there_are_pages() -> None:
    assert len(GUIDES) >= 12
    assert len(PAGES) >= len(GUIDES) + 9


def _page(folder: Path, text: str) -> Path:
    page = folder / "page.md"
    page.write_text(text, encoding="utf-8")
    return page


def test_blocks_share_a_namespace_and_titled_blocks_are_files(tmp_path: Path) -> None:
    page = _page(
        tmp_path,
        '```toml title="conf/a.toml"\nx = 1\n```\ntext\n```python\nfrom pathlib import Path\nx = 2\n```\n'
        '```python\nassert x == 2\nassert Path("conf/a.toml").read_text() == "x = 1\\n"\nPath("ran").touch()\n```\n',
    )
    assert run_page(page, tmp_path) == 2
    assert (tmp_path / "ran").exists()


def test_a_script_runs_as_main(tmp_path: Path) -> None:
    page = _page(tmp_path, f'```python\n{_MAIN_GUARD}\n    raise SystemExit("ran as a script")\n```\n')
    with pytest.raises(SystemExit, match="ran as a script"):
        run_page(page, tmp_path)


def test_a_failing_snippet_fails_and_says_where(tmp_path: Path) -> None:
    page = _page(tmp_path, "# Title\n\n```python\nx = 1\n```\n\n```python\nx = 2\nassert x == 3\n```\n")
    with pytest.raises(AssertionError) as failure:
        run_page(page, tmp_path)
    assert failure.traceback[-1].lineno + 1 == 9
    assert failure.value.__notes__[-1] == f"in the snippet at {page}:8"


def test_a_snippet_that_does_not_compile_fails(tmp_path: Path) -> None:
    with pytest.raises(SyntaxError):
        run_page(_page(tmp_path, "```python\nx = \n```\n"), tmp_path)


def test_a_failing_test_on_a_page_fails(tmp_path: Path) -> None:
    page = _page(tmp_path, "```python\ndef test_it():\n    raise AssertionError('it does not hold')\n```\n")
    with pytest.raises(AssertionError, match="it does not hold"):
        run_page(page, tmp_path)


def test_a_block_that_is_not_run_says_why(tmp_path: Path) -> None:
    excused = _page(tmp_path, "```python no-run\n# not run: it needs a cluster\nraise RuntimeError\n```\n")
    assert run_page(excused, tmp_path) == 0
    with pytest.raises(ValueError, match="line 2: expected the reason for no-run"):
        run_page(_page(tmp_path, "```python no-run\nraise RuntimeError\n```\n"), tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- item\n\n    ```python\n    x = 1\n    ```\n", "line 3: expected a fence of three backticks"),
        ("> ```python\n> x = 1\n> ```\n", "line 1: expected a fence of three backticks"),
        ("````python\nx = 1\n````\n", "line 1: expected a fence of three backticks"),
        ("~~~python\nx = 1\n~~~\n", "line 1: expected a fence of three backticks"),
        ("```python\nx = 1\n", "the block 'python' is never closed"),
    ],
)
def test_no_block_escapes(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run_page(_page(tmp_path, text), tmp_path)
