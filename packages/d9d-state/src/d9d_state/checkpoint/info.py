"""One complete checkpoint, as it lies on disk: what can be known and proven of it before a tensor is read."""

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

from d9d_dist import UserError
from d9d_state._digests import PartRecord
from d9d_state._member import open_member_file
from d9d_state.checkpoint._verify import damage, num_threads, parts_of
from d9d_state.checkpoint.manifest import STATE_NAME, Manifest, rank_state_name
from d9d_state.errors import StateError
from d9d_state.json_value import JsonValue, parse_json
from d9d_state.tensor_info import TensorInfo

_STEP_FOLDER = re.compile(r"step-(\d{8,18})")


@final
@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """A complete checkpoint, of which no tensor was read yet.

    Attributes:
        folder: Where it is.
        manifest: What it consists of.
        is_verified: Whether `newest` has compared all digests, on all ranks together, since this process started.
    """

    folder: Path
    manifest: Manifest = field(repr=False)
    is_verified: bool = False

    @property
    def step(self) -> int:
        """Number of optimizer steps that were done when it was saved."""
        return self.manifest.step

    @property
    def run_id(self) -> str:
        """Which run saved it."""
        return self.manifest.run_id

    @property
    def metric(self) -> float | None:
        """How good the model was, if `save` was told."""
        return self.manifest.metric

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Global shape and dtype of every tensor."""
        return {name: record.info for name, record in self.manifest.tensors.items()}

    @property
    def state(self) -> JsonValue:
        """What `save` got as `state`, read and verified.

        Raises:
            StateError: If the file is damaged.
        """
        return self._read_json(STATE_NAME)

    @property
    def rank_states(self) -> list[JsonValue]:
        """What `save` got as `rank_state` on every rank, read and verified.

        Raises:
            StateError: If a file is damaged.
        """
        return [self._read_json(rank_state_name(rank)) for rank in range(self.manifest.num_ranks)]

    def verify(self, names: list[str] | None = None) -> None:
        """Read files and compare the digest of each part of them with the manifest's.

        Args:
            names: Which files; `None` means all.

        Raises:
            StateError: Naming the damaged files, and in them the tensors.
        """
        parts = [part for part in parts_of(self.manifest) if names is None or part.file in names]
        problems = damage(self.folder, parts, threads=num_threads(None))
        if problems:
            raise StateError(self._describe(problems))

    def _describe(self, problems: list[str]) -> str:
        return (
            f"{'; '.join(problems)} at step {self.step}. "
            f"Move {self.folder} away to resume from the checkpoint before it."
        )

    def _read_json(self, name: str) -> JsonValue:
        """Read once, so that what is proven is what is parsed."""
        try:
            with open_member_file(self.folder, name) as file:
                data = file.read()
        except (UserError, OSError) as error:
            raise StateError(self._describe([str(error)])) from error
        if PartRecord(len(data), hashlib.sha256(data).hexdigest()) != self.manifest.files[name].head:
            raise StateError(self._describe([f"{self.folder / name}: the content is not what was written"]))
        return parse_json(data)


def folder_name(step: int) -> str:
    """The name of the folder with the checkpoint of a step.

    Raises:
        ValueError: If the step is negative.
    """
    if step < 0:
        raise ValueError(f"got step = {step}; expected 0 or more.")
    return f"step-{step:08d}"


def step_of(name: str) -> int:
    """The step that a folder name stands for; -1 if it is not the name of a complete checkpoint."""
    match = _STEP_FOLDER.fullmatch(name)
    step = int(match[1]) if match else -1
    return step if match and name == folder_name(step) else -1


def open_complete(path: Path) -> CheckpointInfo:
    """Read the manifest of a folder and look at its files.

    Raises:
        StateError: Saying why it is no complete checkpoint.
    """
    step = step_of(path.name)
    if step < 0 or path.is_symlink() or not path.is_dir():
        raise StateError("it is no folder with the name of a complete checkpoint, such as step-00000100.")
    manifest = Manifest.read(path)
    if manifest.step != step:
        raise StateError(f"its manifest is of step {manifest.step}.")
    for name, record in manifest.files.items():
        try:
            with open_member_file(path, name) as file:
                size = os.fstat(file.fileno()).st_size
        except (UserError, OSError) as error:
            raise StateError(str(error)) from error
        if size != record.size:
            raise StateError(f"{name} has {size} bytes, but {record.size} were written.")
    return CheckpointInfo(path, manifest)
