"""Handle of a complete checkpoint on disk: its metadata, JSON state and verification."""

import logging
import re
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

from d9d_dist import UserError
from d9d_state._digests import ALGORITHM, PartRecord
from d9d_state._member import AnyPath, as_local, open_reader, read_member
from d9d_state.checkpoint._verify import damage, num_threads, parts_of
from d9d_state.checkpoint.manifest import STATE_NAME, Manifest, rank_state_name, without_digest
from d9d_state.errors import StateError, as_state_error
from d9d_state.json_value import JsonValue, parse_json
from d9d_state.object_path import ObjectPath
from d9d_state.tensor_info import TensorInfo

_LOGGER = logging.getLogger("d9d.state")
AMENDMENT_NAME = "amendment.json"  # metric and entries of the shared state that `CheckpointStore.amend` replaced
_STEP_FOLDER = re.compile(r"step-(\d{8,18})")


@final
@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """Handle of a complete checkpoint. It holds no tensor data; JSON state is read from disk on access.

    Attributes:
        root: Folder of the checkpoint, or its prefix in an object store.
        manifest: Parsed manifest: tensors, chunks and files.
        is_verified: True if `CheckpointStore.newest` verified all digests, distributed over the ranks.
    """

    root: AnyPath
    manifest: Manifest = field(repr=False)
    is_verified: bool = False

    @property
    def folder(self) -> Path:
        """Folder of the checkpoint in a file system; raises `UserError` for a checkpoint in an object store."""
        return as_local(self.root)

    @property
    def step(self) -> int:
        """Number of optimizer steps completed at the save."""
        return self.manifest.step

    @property
    def run_id(self) -> str:
        """Id of the run that saved the checkpoint."""
        return self.manifest.run_id

    @property
    def metric(self) -> float | None:
        """Metric that was passed to `save` or, later, to `amend`; `None` without one."""
        metric = self._amendment().get("metric")
        return metric if isinstance(metric, float) else self.manifest.metric

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Global shape and dtype of every tensor."""
        return {name: record.info for name, record in self.manifest.tensors.items()}

    @property
    def state(self) -> JsonValue:
        """Shared state passed to `save`, with the entries passed to `amend`, read from their files.

        Raises `StateError` if the file of `save` is damaged. A damaged file of `amend` is ignored with a warning.
        """
        saved, entries = self._read_json(STATE_NAME), self._amendment().get("entries")
        return {**saved, **entries} if isinstance(saved, dict) and isinstance(entries, dict) else saved

    @property
    def rank_states(self) -> list[JsonValue]:
        """State that each rank passed to `save`, in rank order; raises `StateError` if a file is damaged."""
        return [self._read_json(rank_state_name(rank)) for rank in range(self.manifest.num_ranks)]

    def verify(self) -> None:
        """Verify the digests of all files; raise `StateError` with the damaged files and tensors."""
        if problems := damage(self.root, parts_of(self.manifest), threads=num_threads(None)):
            raise self._damaged("; ".join(problems))

    def _damaged(self, problem: str) -> StateError:
        return StateError(
            f"{problem} at step {self.step}. Move {self.root} away to resume from the checkpoint before it."
        )

    def _amendment(self) -> dict[str, JsonValue]:
        path = self.root / AMENDMENT_NAME
        try:
            return without_digest(path.read_bytes()) if path.is_file() else {}
        except (OSError, ValueError, TypeError) as error:
            _LOGGER.warning("ignoring %s: %s", path, error)
            return {}

    def _read_json(self, name: str) -> JsonValue:
        """Read a JSON file, verify its digest, and parse the verified bytes."""
        try:
            data = read_member(self.root, name)
        except (UserError, OSError) as error:
            raise self._damaged(str(error)) from error
        if PartRecord.of(data) != self.manifest.files[name].head:
            raise self._damaged(f"{self.root / name}: the content does not have the recorded {ALGORITHM} digest")
        return parse_json(data)


def folder_name(step: int) -> str:
    """Return the folder name of a step's checkpoint, such as `step-00000100`; raise `UserError` if it is not a step."""
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise UserError(f"got step = {step!r}; expected an int, 0 or more: the number of completed optimizer steps.")
    return f"step-{step:08d}"


def step_of(name: str) -> int:
    """Parse the step from a folder name; return -1 if it is not the folder name of a complete checkpoint."""
    match = _STEP_FOLDER.fullmatch(name)
    step = int(match[1]) if match else -1
    return step if match and name == folder_name(step) else -1


def open_complete(path: AnyPath) -> CheckpointInfo:
    """Read the manifest and check that every file has its recorded size; raise `StateError` with the reason if not."""
    step = step_of(path.name)
    if step < 0 or (isinstance(path, Path) and path.is_symlink()) or not path.is_dir():
        raise StateError("it is not a checkpoint; expected a folder with a name like step-00000100.")
    manifest = Manifest.read(path)
    if manifest.step != step:
        raise StateError(f"its manifest has step {manifest.step}; expected the step in the folder name.")
    listed = path.sizes() if isinstance(path, ObjectPath) else {}  # one request instead of one for each file
    for name, record in manifest.files.items():
        size = listed.get(name)
        if size is None:
            with as_state_error(errors=(UserError, OSError)), closing(open_reader(path, name)) as reader:
                size = reader.size
        if size != record.size:
            raise StateError(f"{name} has {size} bytes; expected {record.size}.")
    return CheckpointInfo(path, manifest)
