"""Map-style dataset of JSON Lines files: the constructor locates the lines, which are then read on demand."""

import json
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

from d9d_dist import UserError


@final
class JsonLines:
    """Objects in the lines of `.jsonl` files, in the order of the files. Empty lines are skipped.

    The constructor locates the lines, and keeps an offset of eight bytes for each line. Instances can be pickled.

    Raises:
        UserError: If a file does not exist, or there are no lines; in `__getitem__`, if a line is not a JSON object.
    """

    def __init__(self, paths: Path | str | Sequence[Path | str]) -> None:
        self._paths = [Path(path) for path in ([paths] if isinstance(paths, Path | str) else paths)]
        self._starts: list[array[int]] = []
        self._firsts: list[int] = []  # index of the first line of each file
        self._length = 0
        for path in self._paths:
            if not path.is_file():
                raise UserError(f"{path} does not exist; expected a .jsonl file, with one JSON object in each line.")
            self._firsts.append(self._length)
            self._starts.append(_line_starts(path))
            self._length += len(self._starts[-1])
        if not self._length:
            raise UserError(f"{', '.join(map(str, self._paths))}: no lines; expected one JSON object in each line.")

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < self._length:
            raise IndexError(f"line {index} is out of range: the files have {self._length} lines")
        number = bisect_right(self._firsts, index) - 1
        path, start = self._paths[number], self._starts[number][index - self._firsts[number]]
        with path.open("rb") as file:
            file.seek(start)
            line = file.readline()
        try:
            value = json.loads(line)
        except ValueError as error:
            raise UserError(f"{path}, byte {start}: {error}; expected a JSON object. Correct the line.") from None
        if not isinstance(value, dict):
            raise UserError(f"{path}, byte {start}: got a {type(value).__name__}; expected a JSON object.")
        return value


def _line_starts(path: Path) -> "array[int]":
    starts, position = array("q"), 0
    with path.open("rb") as file:
        for line in file:
            if line.strip():
                starts.append(position)
            position += len(line)
    return starts
