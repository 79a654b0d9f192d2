"""Run the Python snippets of a page: all of its blocks in order and in one namespace, in a new folder.

A block of any language with `title="x.toml"` after its language is also a file of this name in that folder. Functions
named `test_*` are called at the end, as by pytest. A block marked `python no-run` is skipped, and the line above it
gives the reason: `<!-- not run: ... -->`. `commands.py` runs the blocks of shell commands, which have the same marks;
one marked `exit=2` must exit with 2. This file imports only the standard library, so that the README of a package
runs where only that package is installed:

    python integration_tests/snippets.py packages/d9d-dist/README.md
"""

import contextlib
import re
import sys
import tempfile
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

_FENCE = re.compile(r"^(?P<indent>[ >]*)(?P<ticks>```+|~~~+)(?P<info>.*)$")
_SHELL = re.compile(r"(sh|bash|shell|console)\b")
_EXIT = re.compile(r"\bexit=(\d+)")
_PYTHON = re.compile(r"[{. ]*(python|py)", re.IGNORECASE)
_TITLE = re.compile(r'\btitle="([^"]+)"')
_NOT_RUN = re.compile(r"<!-- not run: .+ -->")
MAIN_GUARD = 'if __name__ == "__main__":'


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
    def is_shell(self) -> bool:
        return _SHELL.match(self.info) is not None

    @property
    def exit_code(self) -> int:
        match = _EXIT.search(self.info)
        return 0 if match is None else int(match[1])

    @property
    def runs(self) -> bool:
        return (self.is_python or self.is_shell) and "no-run" not in self.info.split()


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
        if (
            (block.is_python or block.is_shell)
            and not block.runs
            and not _NOT_RUN.fullmatch(page[max(block.line - 3, 0)])
        ):
            raise ValueError(f"line {block.line - 1}: expected the reason above the block: <!-- not run: ... -->")
    return found


RunShell = Callable[[str, Path, int], None]
"""Function that runs the commands of a block in a folder, and raises if one exits with another code."""


def run_page(page: Path, folder: Path, *, run_shell: RunShell | None = None) -> int:
    """Run the snippets of a page in `folder`, and return the number of blocks. Exceptions of snippets propagate.

    Without `run_shell`, blocks of shell commands are skipped.
    """
    snippets = blocks(page.read_text(encoding="utf-8"))
    python = [block for block in snippets if block.runs and block.is_python]
    namespace = ModuleType(re.sub(r"\W", "_", f"snippets_of_{page.parent.name}_{page.stem}"))
    whole = folder / f"{namespace.__name__}.py"
    whole.write_text(_on_their_lines(python), encoding="utf-8")
    namespace.__file__ = str(whole)
    with contextlib.chdir(folder), _as_a_script(namespace, whole):
        for block in snippets:
            if block.title is not None:
                Path(block.title).parent.mkdir(parents=True, exist_ok=True)
                Path(block.title).write_text(block.code, encoding="utf-8")
            if block.runs and block.is_python:
                _run(block, namespace, whole, page)
            elif block.runs and run_shell is not None:
                with _noting(f"in the commands at {page}:{block.line}"):
                    run_shell(block.code, folder, block.exit_code)
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
    names = {"__name__": "__main__" if MAIN_GUARD in block.code else name, "__file__": str(source)}
    before = {key: vars(namespace).get(key) for key in names}
    try:
        vars(namespace).update(names)
        with _noting(f"in the snippet at {page}:{block.line}"):
            code = compile(above + block.code, str(source), "exec", dont_inherit=True)
            exec(code, vars(namespace))  # noqa: S102  (our own documentation)
    finally:
        vars(namespace).update(before)


@contextlib.contextmanager
def _noting(note: str) -> Generator[None]:
    """Add a note to exceptions of the body."""
    try:
        yield
    except BaseException as error:
        error.add_note(note)
        raise


if __name__ == "__main__":
    for name in sys.argv[1:]:
        with tempfile.TemporaryDirectory() as folder:
            print(f"{name}: {run_page(Path(name).absolute(), Path(folder))} snippets ran")
