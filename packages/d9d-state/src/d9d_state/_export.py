"""A folder in the Hugging Face layout, written by several ranks, complete or not there at all.

All ranks know what will be in every file before the first byte of a tensor is read. Each file has one writer, which
holds one tensor at a time. The main process writes the index last, and gives the folder its name.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import final

from torch import Tensor

from d9d_dist import DistributedContext, UserError
from d9d_state import _files
from d9d_state._consensus import agree, is_main
from d9d_state._export_plan import PlannedFile
from d9d_state._partial_folder import check_sizes, discard_partial, make_partial, partial_of
from d9d_state._shared_folder import is_token
from d9d_state._streamed_file import StreamedFile
from d9d_state.errors import StateError, describe
from d9d_state.json_value import JsonValue, dump_json
from d9d_state.model_folder import INDEX_NAME
from d9d_state.safetensors_layout import FileLayout

_METADATA = {"format": "pt"}
_OWN_NAMES = re.compile(r"model(-\d{5,}-of-\d{5,})?\.safetensors(\.index\.json)?")


@final
class Export:
    """The files of one export while they are being written, in a folder beside the final one.

    A rank that fails keeps its problem for `commit`, since the others count on it in collectives until then.
    """

    def __init__(self, target: Path, files: Sequence[PlannedFile], ctx: DistributedContext | None) -> None:
        """Make the folder and this rank's files. Collective.

        Args:
            target: The final folder.
            files: The same plan on every rank.
            ctx: The ranks; `None` for a process on its own.

        Raises:
            StateError: On every rank, if the folder cannot be made, or ranks do not share it.
        """
        self._target = target
        self._partial = partial_of(target)
        self._plan = files
        self._ctx = ctx
        rank = 0 if ctx is None else ctx.rank
        self._plan_of = {name: file for file in files if file.rank == rank for name in file.tensors}
        self._is_first = rank == 0
        self._open: dict[str, StreamedFile] = {}
        self._problem: str | None = None
        # A rank that writes nothing need not see the folder; the main process writes the index.
        make_partial(target, ctx, writes=any(file.rank == rank for file in files))

    @property
    def names(self) -> frozenset[str]:
        """The tensors that this rank writes; none after a failure."""
        return frozenset(self._plan_of)

    def attempt(self, work: Callable[[], None]) -> None:
        """Do a part of the work; after a failure, nothing is done."""
        if self._problem is None:
            self._problem = self._attempt(work)

    def write(self, tensors: Mapping[str, Tensor]) -> None:
        """Write those of some tensors that are this rank's."""
        for name, tensor in tensors.items():
            if name in self._plan_of:
                plan = self._plan_of[name]
                file = self._open[plan.name] if plan.name in self._open else self._begin(plan)
                file.write(name, tensor)
                if file.is_complete:
                    self._open.pop(plan.name).close()

    def commit(self, texts: Mapping[str, bytes]) -> None:
        """Bring everything to the disk, write what is no tensor, the index last, and name the folder. Collective.

        Args:
            texts: The files that hold no tensors.

        Raises:
            StateError: On every rank, if anything went wrong on one. The earlier export is then still there.
        """
        self.attempt(self._close)
        self._abandon()
        try:
            agree(self._problem, self._ctx)
            agree(self._attempt(lambda: self._finish(texts)) if is_main(self._ctx) else None, self._ctx)
        except StateError:
            self._clear()
            raise

    def _begin(self, plan: PlannedFile) -> StreamedFile:
        self._open[plan.name] = StreamedFile(self._partial / plan.name, plan.tensors, metadata=_METADATA)
        return self._open[plan.name]

    def _close(self) -> None:
        assert not self._open, f"not all was written: {', '.join(self._open)}"
        for plan in self._plan:
            if not plan.tensors and self._is_first:  # a model without tensors has a file all the same
                self._begin(plan)
                self._open.pop(plan.name).close()

    def _abandon(self) -> None:
        """Give back what a failure left open."""
        while self._open:
            self._open.popitem()[1].abandon()

    def _clear(self) -> None:
        """Take away what a failure left on the disk, which may be what is full; if that fails too, it is no news."""
        if is_main(self._ctx):
            with suppress(OSError):
                discard_partial(self._partial)

    def _finish(self, texts: Mapping[str, bytes]) -> None:
        for name, text in texts.items():
            _files.write_file(self._partial / name, [text])
        if len(self._plan) > 1:
            _files.write_file(self._partial / INDEX_NAME, [self._index()])
        check_sizes(self._partial, {file.name: _num_bytes(file) for file in self._plan})
        _files.fsync_folder(self._partial)
        if self._target.exists():
            _files.exchange(self._partial, self._target)
            _files.fsync_folder(self._target.parent)
            _files.remove_folder(self._partial)
        else:
            _files.rename(self._partial, self._target)
            _files.fsync_folder(self._target.parent)

    def _index(self) -> bytes:
        weight_map = {name: file.name for file in self._plan for name in file.tensors}
        total = sum(info.num_bytes for file in self._plan for info in file.tensors.values())
        return dump_json({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2)

    def _attempt(self, work: Callable[[], None]) -> str | None:
        """Do something that may fail; what went wrong."""
        try:
            work()
        except Exception as error:  # whatever it is, the others wait for the agreement
            self._plan_of.clear()
            return f"{self._target} could not be written: {describe(error)}"
        return None


def extra_texts(extra_files: Mapping[str, JsonValue | bytes]) -> dict[str, bytes]:
    """Return the content of the files that stand beside the weights; bytes as they are.

    Raises:
        ValueError: If a name is not plain or is one of the weights' own, or a value is no JSON.
    """
    for name in extra_files:
        if name in ("", ".", "..") or "/" in name or _OWN_NAMES.fullmatch(name):
            raise ValueError(
                f"got the extra file {name!r}; expected a plain file name that is not one of the weights'."
            )
    return {
        name: value if isinstance(value, bytes) else dump_json(value, indent=2) + b"\n"
        for name, value in extra_files.items()
    }


def refuse_foreign(target: Path, own: Iterable[str]) -> None:
    """Refuse to replace a folder that nobody would call an export.

    Raises:
        UserError: Naming what is in the way.
    """
    known = set(own)
    for folder in (target, partial_of(target)):
        if not folder.exists():
            continue
        if not folder.is_dir():
            raise UserError(f"{folder} is a file; expected a folder to write the model to.")
        foreign = sorted(path.name for path in folder.iterdir() if not _is_own(path, known))
        if foreign:
            raise UserError(
                f"{folder} holds {', '.join(foreign)}, which this export would delete; choose another folder or move "
                "them."
            )


def _num_bytes(plan: PlannedFile) -> int:
    """Return the size of a file with its header."""
    return FileLayout.of(plan.tensors, metadata=_METADATA).num_bytes


def _is_own(path: Path, known: set[str]) -> bool:
    is_known = path.name in known or _OWN_NAMES.fullmatch(path.name) is not None or is_token(path.name)
    return path.is_file() and is_known
