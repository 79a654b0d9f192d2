"""Run every Python snippet of the documentation and the READMEs.

The python blocks of a page run in order and in one namespace, in a new folder. A block of any language with
`title="x.toml"` after its language is also a file of this name in that folder. Functions named `test_*` are called at
the end, as by pytest. In a README a block marked `python no-run` is skipped, and the line above it gives the reason:
`<!-- not run: ... -->`. In the guides all blocks run.
"""

import contextlib
import re
import sys
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[1]
_WITHOUT_SNIPPETS = {"decisions.md"}  # a table
GUIDES = sorted(path for path in (ROOT / "docs").glob("*.md") if path.name not in _WITHOUT_SNIPPETS)
PAGES = [*GUIDES, *sorted(ROOT.glob("packages/*/README.md")), *sorted(ROOT.glob("README.md"))]

_FENCE = re.compile(r"^(?P<indent>[ >]*)(?P<ticks>```+|~~~+)(?P<info>.*)$")
_PYTHON = re.compile(r"[{. ]*(python|py)", re.IGNORECASE)
_TITLE = re.compile(r'\btitle="([^"]+)"')
_NOT_RUN = re.compile(r"<!-- not run: .+ -->")
_MAIN_GUARD = 'if __name__ == "__main__":'


@dataclass(frozen=True, slots=True)
class Block:
    """Fenced block of a page; `line` is the number of its first line."""

    info: str
    code: str
    line: int

    @property
    def title(self) -> str | None:
        match = _TITLE.search(self.info)
        return None if match is None else match[1]

    @property
    def is_python(self) -> bool:
        return _PYTHON.match(self.info) is not None

    @property
    def runs(self) -> bool:
        return self.is_python and "no-run" not in self.info.split()


def blocks(text: str) -> list[Block]:
    """Return the fenced blocks of a page, in order.

    Raises:
        ValueError: If a block would silently be skipped: it is indented, never closed, or not run without a reason.
    """
    found: list[Block] = []
    page = text.splitlines()
    opened: tuple[int, str] | None = None
    for number, line in enumerate(page):
        if opened is not None:
            start, info = opened
            if line.rstrip() == "```":
                found.append(Block(info.strip(), "".join(f"{code}\n" for code in page[start:number]), start + 1))
                opened = None
        elif fence := _FENCE.match(line):
            if fence["indent"] or fence["ticks"] != "```":
                raise ValueError(f"line {number + 1}: expected a fence of three backticks at the start of the line.")
            opened = number + 1, fence["info"]
    if opened is not None:
        raise ValueError(f"line {opened[0]}: the block is never closed.")
    for block in found:
        if block.is_python and not block.runs and not _NOT_RUN.fullmatch(page[max(block.line - 3, 0)]):
            raise ValueError(f"line {block.line - 1}: expected the reason above the block: <!-- not run: ... -->")
    return found


def run_page(page: Path, folder: Path) -> int:
    """Run the snippets of a page in `folder`, and return the number of blocks. Exceptions of snippets propagate."""
    snippets = blocks(page.read_text(encoding="utf-8"))
    python = [block for block in snippets if block.runs]
    namespace = ModuleType(re.sub(r"\W", "_", f"snippets_of_{page.parent.name}_{page.stem}"))
    whole = folder / f"{namespace.__name__}.py"
    whole.write_text(_on_their_lines(python), encoding="utf-8")
    namespace.__file__ = str(whole)
    with contextlib.chdir(folder), _as_a_script(namespace, whole):
        for block in snippets:
            if block.title is not None:
                Path(block.title).parent.mkdir(parents=True, exist_ok=True)
                Path(block.title).write_text(block.code, encoding="utf-8")
            if block.runs:
                _run(block, namespace, whole, page)
        for name in [name for name in vars(namespace) if name.startswith("test_")]:
            vars(namespace)[name]()
    return len(python)


@contextlib.contextmanager
def _as_a_script(namespace: ModuleType, file: Path) -> Generator[None]:
    """Set the command line of a script without arguments; on exit remove the namespace from `sys.modules`."""
    arguments, sys.argv = sys.argv, [str(file)]
    try:
        yield
    finally:
        sys.argv = arguments
        for name in [name for name, module in sys.modules.items() if module is namespace]:
            del sys.modules[name]


def _on_their_lines(python: list[Block]) -> str:
    """Return the blocks as one file, on their lines of the page, for tracebacks and for other processes."""
    lines: list[str] = []
    for block in python:
        lines += [""] * (block.line - 1 - len(lines)) + block.code.splitlines()
    return "\n".join(lines) + "\n"


def _run(block: Block, namespace: ModuleType, whole: Path, page: Path) -> None:
    """Run a block as part of the page's file, or as its own file if it has a title; `run_ranks` imports from it."""
    name, source, above = namespace.__name__, whole, "\n" * (block.line - 1)
    if block.title is not None:
        name, source, above = f"{name}_{Path(block.title).stem}", Path(block.title).absolute(), ""
    sys.modules[name] = namespace
    # Other processes cannot import the functions of a script, as for any script.
    names = {"__name__": "__main__" if _MAIN_GUARD in block.code else name, "__file__": str(source)}
    before = {key: vars(namespace).get(key) for key in names}
    try:
        vars(namespace).update(names)
        code = compile(above + block.code, str(source), "exec", dont_inherit=True)
        exec(code, vars(namespace))  # noqa: S102  (our own documentation)
    except BaseException as error:
        error.add_note(f"in the snippet at {page}:{block.line}")
        raise
    finally:
        vars(namespace).update(before)


@pytest.mark.parametrize("page", PAGES, ids=[path.relative_to(ROOT).as_posix() for path in PAGES])
def test_snippets_run(page: Path, tmp_path: Path) -> None:
    run_page(page, tmp_path)
    assert not dist.is_initialized(), "a snippet left its process group running"


@pytest.mark.parametrize("page", GUIDES, ids=[path.name for path in GUIDES])
def test_every_guide_has_snippets_and_all_of_them_run(page: Path) -> None:
    shown = [block for block in blocks(page.read_text(encoding="utf-8")) if block.is_python]
    assert shown
    assert all(block.runs for block in shown)


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


def test_a_titled_snippet_is_a_file_and_shares_the_namespace(tmp_path: Path) -> None:
    page = _page(
        tmp_path,
        "```python\nx = 2\ndef here(): ...\n```\n"
        '```python title="there.py"\ndef there(): return x\n```\n'
        "```python\nimport inspect\nassert there() == 2\n"
        'assert inspect.getsourcefile(there).endswith("/there.py")\n'
        'assert inspect.getsourcefile(here).endswith("_page.py")\n'
        'assert inspect.getsource(there) == "def there(): return x\\n"\n'
        "assert inspect.getmodule(there) is not None\n```\n",
    )
    assert run_page(page, tmp_path) == 3


def test_a_failing_snippet_fails_with_its_line(tmp_path: Path) -> None:
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


def test_a_skipped_block_needs_a_reason(tmp_path: Path) -> None:
    block = "```python no-run\nraise RuntimeError\n```\n"
    assert run_page(_page(tmp_path, f"<!-- not run: it needs a cluster -->\n{block}"), tmp_path) == 0
    with pytest.raises(ValueError, match=r"line 2: expected the reason above the block: <!-- not run: \.\.\. -->"):
        run_page(_page(tmp_path, f"text\n{block}"), tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- item\n\n    ```python\n    x = 1\n    ```\n", "line 3: expected a fence of three backticks"),
        ("> ```python\n> x = 1\n> ```\n", "line 1: expected a fence of three backticks"),
        ("````python\nx = 1\n````\n", "line 1: expected a fence of three backticks"),
        ("~~~python\nx = 1\n~~~\n", "line 1: expected a fence of three backticks"),
        ("```python\nx = 1\n", "line 1: the block is never closed"),
    ],
)
def test_no_block_is_skipped_silently(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run_page(_page(tmp_path, text), tmp_path)
