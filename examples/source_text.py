"""Data of the examples: source files as documents, and each byte a token."""

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from pydantic import Field, PositiveInt

from d9d_dist import UserError
from d9d_loop import DataProvider, Section
from d9d_loop.data import DocumentStream, PackedStream, SampleStream, cached_token_file

_CHANGE = "Change it with --text.folder PATH or --text.pattern PATTERN; of a preset, with --dataset.text.folder PATH."
_SKIPPED = {"site-packages", "test"}


class Text(Section):
    folder: Path = Path(sysconfig.get_path("stdlib"))
    pattern: str = Field(default="**/*.py", min_length=1)
    length: PositiveInt = 256
    tokens: Path = Path("runs/tokens")  # cache of token files for later jobs


def read_text(text: Text) -> tuple[list[bytes], list[bytes]]:
    """Return training and held-out text: whole files; a hash of its path selects one file in ten as held out."""
    if not text.folder.is_dir():
        raise UserError(f"text.folder = {text.folder} is not a folder; expected one with text. {_CHANGE}")
    files = [path.relative_to(text.folder) for path in sorted({*_found(text)}) if path.is_file()]
    files = [file for file in files if not _SKIPPED & set(file.parts)]
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for file in files:
        held_out = hashlib.sha256(file.as_posix().encode()).digest()[0] % 10 == 0
        parts[held_out].append((text.folder / file).read_bytes())
    if not all(map(any, parts)):
        raise UserError(
            f"text.folder = {text.folder} has {len(files)} files {text.pattern}; expected text in the training files "
            f"and in the held-out tenth of the files. {_CHANGE}"
        )
    return parts


def _found(text: Text) -> Iterator[Path]:
    """Yield the files of the pattern; `**/` does not enter skipped folders, which may have many more files."""
    if not text.pattern.startswith("**/"):
        yield from text.folder.glob(text.pattern)
        return
    for folder, children, _ in os.walk(text.folder):
        children[:] = set(children) - _SKIPPED
        yield from Path(folder).glob(text.pattern.removeprefix("**/"))


class PackedText(DataProvider):
    """Files packed into rows of `text.length` bytes; a byte attends only to the preceding bytes of its own file."""

    draws = False  # only the order is random

    def __init__(self, text: Text) -> None:
        self.length = text.length
        self.train, self.held_out = (cached_token_file(files, text.tokens) for files in read_text(text))

    def training(self, *, seed: int) -> SampleStream:
        documents = DocumentStream(self.train, max_length=self.length, seed=seed)
        return PackedStream(documents, row_length=self.length, seed=seed)

    def evaluation(self) -> SampleStream:
        documents = DocumentStream(self.held_out, max_length=self.length, seed=0, epochs=1)
        return PackedStream(documents, row_length=self.length, seed=0)
