"""Keeps what inference computes, so that each result is written once, in order, however often the job is restarted.

Samples are divided into parts of equally many consecutive ones. A part is a file that appears in one piece; which parts
are there says all about how far the job is. In the end they become one file.
"""

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import final

from pydantic import JsonValue

from d9d_dist import UserError


@final
class ResultsFolder:
    """The results of a job: `results.jsonl` when it is done, one line for each sample; a folder of parts until then.

    Args:
        folder: The folder of the run.
        num_samples: Samples of the job.
        part_size: Samples of a part.
    """

    def __init__(self, folder: Path, *, num_samples: int, part_size: int) -> None:
        self.file = folder / "results.jsonl"
        self._parts = folder / "results.partial"
        self._num_samples, self._part_size = num_samples, part_size
        self._plan = {"num_samples": num_samples, "part_size": part_size}

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
            UserError: If parts of other samples are there.
        """
        plan = self._parts / "plan.json"
        if not plan.exists():
            return
        found = json.loads(plan.read_text(encoding="utf-8"))
        if found != self._plan:
            raise UserError(
                f"{self._parts} holds results of a job with {found}, but this one has {self._plan}; they cannot become "
                "one. Use the same data and part size, or --run.name for a new run."
            )

    def is_complete(self) -> bool:
        """Whether the job is done."""
        return self.file.exists()

    def missing(self) -> list[int]:
        """The parts that are not there yet; makes the folder for them. Called by the main process only."""
        self._parts.mkdir(parents=True, exist_ok=True)
        _write(self._parts / "plan.json", json.dumps(self._plan))
        return [part for part in range(self.num_parts) if not self._part(part).exists()]

    def write(self, part: int, results: Sequence[JsonValue]) -> None:
        """Write the results of a part; when this returns they are on the disk."""
        assert len(results) == len(self.samples_of(part))
        _write(self._part(part), "".join(f"{json.dumps(result)}\n" for result in results))

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
