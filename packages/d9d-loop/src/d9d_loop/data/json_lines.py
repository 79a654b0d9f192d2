"""Map-style dataset of JSON Lines files: the constructor locates the lines, which are then read on demand."""

import hashlib
import json
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, final

from pydantic import JsonValue

from d9d_dist import UserError

_PARSED_AT_ONCE = 1 << 26
"""Total size of files in bytes up to which the constructor parses all lines."""


@final
class JsonObject(dict[str, Any]):
    """Object of a JSON file. Its nulls are in the file, whereas tables also have nulls for absent keys."""


@final
class JsonLines:
    """Objects in the lines of `.jsonl` files, in the order of the files. Empty lines are skipped.

    The constructor locates the lines, and keeps an offset of eight bytes for each line. It also parses the lines of
    files of up to 64 MiB in total, so that a bad line is an error before a job starts. Instances can be pickled.

    Raises:
        UserError: If a file does not exist, there are no lines, or a line is not a JSON object; in `__getitem__` for
            large files. The message has the file and the line number.
    """

    def __init__(self, paths: Path | str | Sequence[Path | str]) -> None:
        self._paths = [Path(path) for path in ([paths] if isinstance(paths, Path | str) else paths)]
        self._starts: list[array[int]] = []
        self._firsts: list[int] = []  # index of the first line of each file
        self._length = 0
        for path in self._paths:
            if not path.is_file():
                raise UserError(f"{path} does not exist; expected a .jsonl file, with one JSON object in each line.")
        digest = hashlib.sha256()
        parses = sum(path.stat().st_size for path in self._paths) <= _PARSED_AT_ONCE
        for path in self._paths:
            starts, position = array("q"), 0
            with path.open("rb") as file:
                for number, line in enumerate(file, 1):
                    if text := line.strip():
                        digest.update(text + b"\n")
                        starts.append(position)
                        if parses:
                            _parse(text, partial(_place, path, number))
                    position += len(line)
            self._firsts.append(self._length)
            self._starts.append(starts)
            self._length += len(starts)
        if not self._length:
            raise UserError(f"{', '.join(map(str, self._paths))}: no lines; expected one JSON object in each line.")
        self._digest = digest.hexdigest()

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> JsonObject:
        path, start = self._locate(index)
        with path.open("rb") as file:
            file.seek(start)
            line = file.readline()
        return _parse(line, lambda: self.place(index))

    def __iter__(self) -> Iterator[JsonObject]:
        for path in self._paths:
            with path.open("rb") as file:
                for number, line in enumerate(file, 1):
                    if line.strip():
                        yield _parse(line, partial(_place, path, number))

    def place(self, index: int) -> str:
        """Return the file and the line number of a sample, for error messages. Reads the file up to the line."""
        path, start = self._locate(index)
        with path.open("rb") as file:
            number = 1
            while file.tell() < start and file.readline():
                number += 1
        return _place(path, number)

    def path(self, index: int) -> Path:
        """Return the file of a sample."""
        return self._locate(index)[0]

    def contents_digest(self) -> JsonValue:
        """Return the SHA-256 digest of all lines."""
        return self._digest

    def _locate(self, index: int) -> tuple[Path, int]:
        """Return the file of a line, and the line's first byte."""
        if not 0 <= index < self._length:
            raise IndexError(f"line {index} is out of range: the files have {self._length} lines")
        number = bisect_right(self._firsts, index) - 1
        return self._paths[number], self._starts[number][index - self._firsts[number]]


def _parse(line: bytes, place: Callable[[], str]) -> JsonObject:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise UserError(f"{place()}: {error}; expected a JSON object. Correct the line.") from None
    if not isinstance(value, dict):
        raise UserError(f"{place()}: got a {type(value).__name__}; expected a JSON object. Correct the line.")
    return JsonObject(value)


def _place(path: Path, number: int) -> str:
    return f"{path}, line {number}"
