"""Keeps what inference computes, so that each result is written once, in order, however often the job is restarted.

Samples are divided into parts of equally many consecutive ones. A part is a file that appears in one piece; which parts
are there says all about how far the job is. In the end they become one file.
"""

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import final

from pydantic import JsonValue

from d9d_dist import UserError


@final
class ResultsFolder:
    """The results of a job: `results.jsonl`, one line for each sample, in which parts end up; and what they are of.

    Attributes:
        folder: Where they are.
        file: All results, when the job is done.

    Args:
        folder: See the attribute.
        num_samples: Samples of the job.
        part_size: Samples of a part.
        identity: What else the results follow from; results of something else are not mixed with these.
    """

    def __init__(
        self, folder: Path, *, num_samples: int, part_size: int, identity: Mapping[str, JsonValue] | None = None
    ) -> None:
        self.folder, self.file = folder, folder / "results.jsonl"
        self._plan, self._parts = folder / "plan.json", folder / "parts"
        self._num_samples, self._part_size = num_samples, part_size
        self._identity = {**(identity or {}), "num_samples": num_samples, "part_size": part_size}

    @property
    def num_parts(self) -> int:
        """How many parts there are in all."""
        return -(-self._num_samples // self._part_size)

    def samples_of(self, part: int) -> range:
        """Indices of the samples of a part."""
        start = part * self._part_size
        return range(start, min(start + self._part_size, self._num_samples))

    def check(self) -> None:
        """Check that what is there belongs to this job. Changes nothing.

        Raises:
            UserError: If results of another job are there, saying in what they differ.
        """
        if not self._plan.exists():
            return
        found: dict[str, JsonValue] = json.loads(self._plan.read_text(encoding="utf-8"))
        lines = [
            f"  {key} was {json.dumps(found.get(key))}, and is {json.dumps(self._identity.get(key))}"
            for key in dict.fromkeys([*found, *self._identity])
            if found.get(key) != self._identity.get(key)
        ]
        if lines:
            raise UserError(
                f"{self.folder} holds results of another job, which cannot become one with these:\n"
                + "\n".join(lines)
                + "\nChange that back, or use --run.name for a new run."
            )

    def is_complete(self) -> bool:
        """Whether the job is done."""
        return self.file.exists()

    def missing(self) -> list[int]:
        """The parts that are not there yet; makes the folder for them. Called by the main process only."""
        if self.is_complete():
            shutil.rmtree(self._parts, ignore_errors=True)
            return []
        self._parts.mkdir(parents=True, exist_ok=True)
        _write(self._plan, json.dumps(self._identity, indent=2) + "\n")
        return [part for part in range(self.num_parts) if not self._part(part).exists()]

    def write(self, part: int, results: Sequence[JsonValue]) -> None:
        """Write the results of a part; when this returns they are on the disk.

        Raises:
            UserError: If a result cannot be written as JSON, which has no NaN.
        """
        assert len(results) == len(self.samples_of(part))
        try:
            lines = [f"{json.dumps(result, allow_nan=False)}\n" for result in results]
        except (TypeError, ValueError) as error:
            raise UserError(
                f"a result of the samples {self.samples_of(part)} cannot be written as JSON: {error}. Expected numbers "
                "that are finite, text, lists and dictionaries of them; NaN may be written as None."
            ) from None
        _write(self._part(part), "".join(lines))

    def finish(self) -> None:
        """Make one file of all parts. Called by the main process only, when all are there."""
        partial = self.file.with_suffix(".jsonl.partial")
        with partial.open("wb") as out:
            for part in range(self.num_parts):
                with self._part(part).open("rb") as one:
                    shutil.copyfileobj(one, out)
            out.flush()
            os.fsync(out.fileno())
        _replace(partial, self.file)
        shutil.rmtree(self._parts)

    def _part(self, part: int) -> Path:
        return self._parts / f"part-{part:08}.jsonl"


def _write(file: Path, text: str) -> None:
    partial = file.with_name(f".{file.name}.partial")
    with partial.open("w", encoding="utf-8") as out:
        out.write(text)
        out.flush()
        os.fsync(out.fileno())
    _replace(partial, file)


def _replace(partial: Path, file: Path) -> None:
    partial.replace(file)
    folder = os.open(file.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
