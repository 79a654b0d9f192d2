"""Results of an inference job on disk: each result is written once and in order, even after restarts.

Each part is a file with the results of a fixed number of consecutive samples, created by an atomic rename. A restarted
job computes the parts whose files are missing. At the end, all parts are concatenated into one file.
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import final

from pydantic import JsonValue

from d9d_dist import UserError
from d9d_dist.durable_files import replacing_files
from d9d_loop.job.resume_settings import changes, describe


@final
class ResultsFolder:
    """Folder with the parts, `results.jsonl` (one line per sample) and `plan.json` (the identity of the job).

    `file` exists once the job is complete. `identity` has other values that determine the results; `check` rejects a
    folder with another identity.
    """

    def __init__(
        self, folder: Path, *, num_samples: int, part_size: int, identity: Mapping[str, JsonValue] | None = None
    ) -> None:
        self.folder, self.file = folder, folder / "results.jsonl"
        self._plan, self._parts = folder / "plan.json", folder / "parts"
        self._num_samples, self._part_size = num_samples, part_size
        self._identity = {**(identity or {}), "num_samples": num_samples, "part_size": part_size}
        self._code: dict[str, JsonValue] = {}

    @property
    def num_parts(self) -> int:
        """Number of parts of the job."""
        return -(-self._num_samples // self._part_size)

    def samples_of(self, part: int) -> range:
        """Return the sample indices of a part."""
        start = part * self._part_size
        return range(start, min(start + self._part_size, self._num_samples))

    def check(
        self, contents: Mapping[str, JsonValue] | None = None, code: Mapping[str, JsonValue] | None = None
    ) -> list[str]:
        """Return a line for each change of the code since the existing results in the folder.

        `contents` are further values of the identity, and `code` digests of code by name. Values that the existing
        results do not have are not compared.

        Raises:
            UserError: If existing results belong to another job; the message has the differences.
        """
        self._identity |= contents or {}
        self._code |= code or {}
        if not self._plan.exists():
            return []
        before = json.loads(self._plan.read_text(encoding="utf-8"))
        same = before.pop("code", {})
        if lines := [describe(change) for change in changes(before, self._identity, known_only=True)]:
            raise UserError(
                f"{self.folder} holds results of another job, which cannot be combined with these:\n"
                + "\n".join(lines)
                + "\nRestore these values, or use --run.name for a new run."
            )
        return [f"  {name} has changed" for name, _, _ in changes(same, self._code, known_only=True)]

    def is_complete(self) -> bool:
        """Return True if all results are in `file`."""
        return self.file.exists()

    def missing(self) -> list[int]:
        """Return the indices of the missing parts. Call this method on the main process only.

        Creates the folder and `plan.json`; if the job is complete, removes leftover parts instead.
        """
        if self.is_complete():
            shutil.rmtree(self._parts, ignore_errors=True)
            return []
        self._parts.mkdir(parents=True, exist_ok=True)
        with replacing_files(self._plan) as (out,):
            out.write(f"{json.dumps({**self._identity, 'code': self._code}, indent=2)}\n".encode())
        return [part for part in range(self.num_parts) if not self._part(part).exists()]

    def write(self, part: int, results: Sequence[JsonValue]) -> None:
        """Write the results of a part atomically with fsync; raise `UserError` for non-JSON results such as NaN."""
        assert len(results) == len(self.samples_of(part))
        try:
            lines = [f"{json.dumps(result, allow_nan=False)}\n" for result in results]
        except (TypeError, ValueError) as error:
            raise UserError(
                f"a result of the samples {self.samples_of(part)} cannot be written as JSON: {error}. Expected finite "
                "numbers, text, lists and dictionaries of them; NaN may be written as None."
            ) from None
        with replacing_files(self._part(part)) as (out,):
            out.write("".join(lines).encode())

    def finish(self) -> None:
        """Concatenate all parts into `file` and remove them. Call it on the main process when no part is missing."""
        with replacing_files(self.file) as (out,):
            for part in range(self.num_parts):
                with self._part(part).open("rb") as one:
                    shutil.copyfileobj(one, out)
        shutil.rmtree(self._parts)

    def _part(self, part: int) -> Path:
        return self._parts / f"part-{part:08}.jsonl"
