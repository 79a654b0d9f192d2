"""Atomic export of a model folder in the Hugging Face layout, written by several ranks.

All ranks plan the content of every file before the first tensor is read. One rank writes each file, one tensor at a
time. The main process writes the index last, then renames the folder to its final name.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import final

from torch import Tensor

from d9d_dist import DistributedContext, UserError
from d9d_state import _files
from d9d_state._export_plan import PlannedFile
from d9d_state._partial_folder import check_sizes, discard_partial, make_partial, partial_of
from d9d_state._ranks import failing_together, is_main, rank_of
from d9d_state._shared_folder import is_token
from d9d_state.errors import StateError
from d9d_state.json_value import JsonValue, dump_json
from d9d_state.model_folder import INDEX_NAME
from d9d_state.safetensors_file import FileLayout, StreamedFile

_METADATA = {"format": "pt"}
_OWN_NAMES = re.compile(r"model(-\d{5,}-of-\d{5,})?\.safetensors(\.index\.json)?")


@final
class Export:
    """Files of one export while they are being written, in a partial folder beside the final one.

    A failed rank stores its error until `commit` and continues, because the other ranks' collectives need every rank.
    """

    def __init__(self, target: Path, files: Sequence[PlannedFile], ctx: DistributedContext | None) -> None:
        """Create the partial folder; raise `StateError` on every rank if a writing rank does not see it. Collective."""
        self._target = target
        self._partial = partial_of(target)
        self._plan = files
        self._ctx = ctx
        rank = rank_of(ctx)
        self._plan_of = {name: file for file in files if file.rank == rank for name in file.tensors}
        self._open: dict[str, StreamedFile] = {}
        self._error: Exception | None = None
        # Only ranks that write a file need to see the folder. The main process writes the index.
        make_partial(target, ctx, writes=any(file.rank == rank for file in files))

    @property
    def names(self) -> frozenset[str]:
        """Names of the tensors that this rank writes; empty after a failure."""
        return frozenset(self._plan_of)

    def attempt(self, work: Callable[[], None]) -> None:
        """Call `work` and store its error for `commit`. After a failure, further calls do nothing."""
        if self._error is None:
            try:
                work()
            except Exception as error:  # any error: the other ranks wait for this rank
                self._plan_of.clear()
                self._error = error.with_traceback(None)  # the traceback would keep tensors in memory

    def write(self, tensors: Mapping[str, Tensor]) -> None:
        """Write the tensors that are assigned to this rank; ignore the others."""
        for name, tensor in tensors.items():
            if name in self._plan_of:
                plan = self._plan_of[name]
                if plan.name not in self._open:
                    self._open[plan.name] = self._create(plan)
                file = self._open[plan.name]
                file.write(name, tensor)
                if file.is_complete:
                    self._open.pop(plan.name).close()

    def commit(self, texts: Mapping[str, bytes]) -> None:
        """Write the extra files and the index, fsync everything, and rename the folder. Collective.

        Raises `StateError` on every rank if any rank failed. In this case an earlier export at the target is unchanged.
        """
        failed = f"{self._target} could not be written"
        for file in self._open.values():
            file.abandon()
        try:
            with failing_together(self._ctx, failed, errors=Exception):
                if self._error is not None:
                    raise self._error
                assert not self._open, f"incomplete files: {', '.join(self._open)}"
            with failing_together(self._ctx, failed, errors=Exception):
                if is_main(self._ctx):
                    self._finish(texts)
        except StateError:
            if is_main(self._ctx):
                with suppress(OSError):
                    discard_partial(self._partial)  # the disk may be full
            raise

    def _create(self, plan: PlannedFile) -> StreamedFile:
        return StreamedFile(self._partial / plan.name, plan.tensors, metadata=_METADATA)

    def _finish(self, texts: Mapping[str, bytes]) -> None:
        for plan in self._plan:
            if not plan.tensors:  # a model without tensors also needs one file
                self._create(plan).close()
        for name, text in texts.items():
            _files.write_file(self._partial / name, [text])
        if len(self._plan) > 1:
            _files.write_file(self._partial / INDEX_NAME, [self._index()])
        layouts = {file.name: FileLayout.of(file.tensors, metadata=_METADATA) for file in self._plan}
        check_sizes(self._partial, {name: layout.num_bytes for name, layout in layouts.items()})
        _files.fsync(self._partial)
        commit = _files.exchange if self._target.exists() else _files.rename
        commit(self._partial, self._target)
        _files.fsync(self._target.parent)
        discard_partial(self._partial)  # after an exchange, the earlier export

    def _index(self) -> bytes:
        weight_map = {name: file.name for file in self._plan for name in file.tensors}
        total = sum(info.num_bytes for file in self._plan for info in file.tensors.values())
        return dump_json({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2)


def extra_texts(extra_files: Mapping[str, JsonValue | bytes]) -> dict[str, bytes]:
    """Encode extra files: JSON values as text, bytes unchanged; raise `ValueError` for invalid names or values."""
    for name in extra_files:
        if name in ("", ".", "..") or "/" in name or _OWN_NAMES.fullmatch(name):
            raise ValueError(
                f"got the extra file {name!r}; expected a plain file name that is not the name of a weight file."
            )
    return {
        name: value if isinstance(value, bytes) else dump_json(value, indent=2) + b"\n"
        for name, value in extra_files.items()
    }


def refuse_foreign(target: Path, own: Iterable[str]) -> None:
    """Raise `UserError` if `target` holds files that do not belong to an earlier export; the error lists them."""
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
                "them away."
            )


def _is_own(path: Path, known: set[str]) -> bool:
    is_known = path.name in known or _OWN_NAMES.fullmatch(path.name) is not None or is_token(path.name)
    return path.is_file() and is_known
