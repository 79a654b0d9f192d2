"""Writes to a local tier: a rank's part, and the replicas of other hosts' parts.

A tier has two slots. A save overwrites the slot of the second-last step in place, so that neither memory nor disk space
is allocated again. The last step stays complete until the new step is complete on every host.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor

from d9d_dist import agree
from d9d_state import _files
from d9d_state._digests import digest_parts
from d9d_state._tensor_bytes import bytes_of
from d9d_state.checkpoint import manifest
from d9d_state.checkpoint._commit import chunks_of_rank
from d9d_state.checkpoint._hosts import Hosts
from d9d_state.checkpoint._rank_record import RankRecord, record_name
from d9d_state.checkpoint.save_plan import SavePlan, part_key
from d9d_state.errors import StateError, describe
from d9d_state.json_value import as_list, dump_json, parse_json
from d9d_state.safetensors_file import SafetensorsRecord
from d9d_state.safetensors_layout import FileLayout
from d9d_state.tensor_info import TensorInfo

SLOTS = ("slot-0", "slot-1")
_BLOCK = 1 << 28  # bytes of one message


@final
@dataclass(frozen=True, slots=True)
class TierSave:
    """Content of one save, except the tensor data."""

    save_id: str
    run_id: str
    step: int
    mesh: Mapping[str, int]
    plan: SavePlan
    state: bytes
    rank_state: bytes


@final
class TierWriter:
    """Writer of one rank.

    Args:
        folder: Folder of the tier on this host.
        rank: Rank of this process.
        hosts: Hosts of the job.
        replicas: Number of other hosts that keep a copy of each part.
        group: Gloo group of all ranks; `None` for one process.
    """

    def __init__(
        self, folder: Path, *, rank: int, hosts: Hosts, replicas: int, group: dist.ProcessGroup | None
    ) -> None:
        self._folder, self._rank, self._group = folder, rank, group
        self._peers = hosts.replica_ranks(rank, replicas)
        self._sources = hosts.replicated(rank, replicas)
        self._next = 0
        self._layouts: dict[int, FileLayout] = {}
        self._plan_digest = ""
        self._images: dict[Path, Tensor] = {}
        self.num_bytes_sent = 0

    def overwrite(self, slot: str) -> None:
        """Set the slot of the next save."""
        self._next = SLOTS.index(slot)

    def write(
        self,
        save: TierSave,
        parts: Mapping[str, Tensor],
        wait_copied: Callable[[], None],
        problem: str | None = None,
    ) -> None:
        """Write a step, which is complete on all hosts when this method returns. Collective.

        `parts` must not change before the return. Raises `StateError` on every rank if a rank cannot write, or passes a
        `problem`.
        """
        slot = self._folder / SLOTS[self._next]
        images: dict[int, Tensor] = {}
        try:
            if problem is None:
                images = self._prepare(slot, save.plan)
                wait_copied()
                self._fill(images[self._rank], parts)
        except Exception as error:  # any error: the other ranks wait in agree()
            problem = f"step {save.step} could not be saved in {slot}: {describe(error)}"
        agree(problem, self._group, error=StateError, alone=self._group is None)
        transfers, texts = self._start_transfers(images), b""
        try:
            texts = self._texts(save, images[self._rank])
        except Exception as error:  # any error: the other ranks wait in the exchange
            problem = f"step {save.step} could not be hashed in {slot}: {describe(error)}"
        for transfer in transfers:
            transfer.wait()
        received = self._exchange(texts)
        try:
            for rank, text in received.items():
                if text:
                    self._write_texts(slot, rank, *_parse_texts(text))
        except OSError as error:
            problem = f"step {save.step} could not be saved in {slot}: {describe(error)}"
        agree(problem, self._group, error=StateError, alone=self._group is None)
        self._next = 1 - self._next
        for rank in images:  # the previous step is no longer needed; the next save overwrites its slot
            _files.remove_file(self._folder / SLOTS[self._next] / record_name(rank))

    def _prepare(self, slot: Path, plan: SavePlan) -> dict[int, Tensor]:
        """Return the memory-mapped tensor files of this rank and of the replicas that it keeps, by rank.

        First delete their old records in the slot. Then map the files, and write the headers.
        """
        _files.make_folder(slot)
        if plan.digest != self._plan_digest:
            self._images.clear()
            self._layouts = {rank: _layout(plan, rank) for rank in (self._rank, *self._sources)}
            self._plan_digest = plan.digest
        images: dict[int, Tensor] = {}
        for rank, layout in self._layouts.items():
            _files.remove_file(slot / record_name(rank))
            path = slot / manifest.tensors_name(rank)
            if path not in self._images:
                self._images[path] = _files.map_file(path, layout.num_bytes)
            images[rank] = self._images[path]
            images[rank][: len(layout.header)] = torch.frombuffer(bytearray(layout.header), dtype=torch.uint8)
        return images

    def _fill(self, image: Tensor, parts: Mapping[str, Tensor]) -> None:
        starts = self._layouts[self._rank].starts
        for key, part in parts.items():
            image[starts[key] : starts[key] + part.nbytes].view(part.dtype).view(part.shape).copy_(part)

    def _start_transfers(self, images: Mapping[int, Tensor]) -> list[dist.Work]:
        """Start to send this rank's tensor data to its peers, and to receive the replicas."""
        started: list[dist.Work | None] = []
        for rank in self._sources:
            data = images[rank][len(self._layouts[rank].header) :]
            started += [dist.irecv(block, rank, group=self._group) for block in data.split(_BLOCK) if len(block)]
        data = images[self._rank][len(self._layouts[self._rank].header) :]
        for rank in self._peers:
            started += [dist.isend(block, rank, group=self._group) for block in data.split(_BLOCK) if len(block)]
            self.num_bytes_sent += data.nbytes
        return [work for work in started if work is not None]

    def _texts(self, save: TierSave, image: Tensor) -> bytes:
        """Hash this rank's file; return its record and states as JSON."""
        layout, rank = self._layouts[self._rank], self._rank
        view = bytes_of(image)
        parts = (view[start:end] for start, end in pairwise([*layout.starts.values(), layout.num_bytes]))
        header, *records = digest_parts([view[: len(layout.header)], *parts])
        written = SafetensorsRecord(header, dict(zip(layout.starts, records, strict=True)))
        chunks, size = chunks_of_rank(save.plan, rank, written)
        # Tensors without elements have no chunk; rank 0 records them.
        empty = [name for name, info in save.plan.tensors.items() if info.num_bytes == 0]
        tensors: dict[str, list[manifest.Chunk]] = {name: [] for name in empty} if rank == 0 else {}
        for name, chunk in chunks:
            tensors.setdefault(name, []).append(chunk)
        (rank_state, state) = digest_parts([memoryview(save.rank_state), memoryview(save.state)])
        files = {
            manifest.tensors_name(rank): manifest.FileRecord(size, header),
            manifest.rank_state_name(rank): manifest.FileRecord(rank_state.size, rank_state),
        }
        if rank == 0:
            files[manifest.STATE_NAME] = manifest.FileRecord(state.size, state)
        share = manifest.Manifest(
            save.run_id,
            save.step,
            None,
            save.mesh,
            len(save.plan.parts),
            {name: manifest.TensorRecord(save.plan.tensors[name], tuple(each)) for name, each in tensors.items()},
            files,
        )
        record = RankRecord(save.save_id, rank, share).dump()
        return dump_json([record.decode(), save.rank_state.decode(), save.state.decode() if rank == 0 else None])

    def _exchange(self, texts: bytes) -> dict[int, bytes]:
        """Send this rank's texts to its peers; return its own texts and the texts of the replicas that it keeps."""
        own = torch.frombuffer(bytearray(texts or b"\0"), dtype=torch.uint8)[: len(texts)]
        size = torch.tensor([len(texts)])
        sizes = {rank: torch.zeros(1, dtype=torch.int64) for rank in self._sources}
        _wait_all(
            [
                *(dist.irecv(each, rank, group=self._group) for rank, each in sizes.items()),
                *(dist.isend(size, rank, group=self._group) for rank in self._peers),
            ]
        )
        others = {rank: torch.empty(int(each), dtype=torch.uint8) for rank, each in sizes.items()}
        _wait_all(
            [
                *(dist.irecv(each, rank, group=self._group) for rank, each in others.items()),
                *(dist.isend(own, rank, group=self._group) for rank in self._peers),
            ]
        )
        return {self._rank: texts, **{rank: bytes(bytes_of(each)) for rank, each in others.items()}}

    def _write_texts(self, slot: Path, rank: int, record: bytes, rank_state: bytes, state: bytes | None) -> None:
        """Write the small files of a rank; its record is written last."""
        _files.replace_file(slot / manifest.rank_state_name(rank), rank_state)
        if state is not None:
            _files.replace_file(slot / manifest.STATE_NAME, state)
        _files.fsync_file(slot / manifest.tensors_name(rank))
        _files.fsync_folder(slot)
        _files.replace_file(slot / record_name(rank), record)
        _files.fsync_folder(slot)


def _layout(plan: SavePlan, rank: int) -> FileLayout:
    parts = plan.parts[rank]
    return FileLayout.of(
        {part_key(name, region): TensorInfo(region.sizes, plan.tensors[name].dtype) for name, region in parts}
    )


def _wait_all(works: list[dist.Work | None]) -> None:
    for work in works:
        if work is not None:
            work.wait()


def _parse_texts(text: bytes) -> tuple[bytes, bytes, bytes | None]:
    record, rank_state, state = (None if each is None else str(each).encode() for each in as_list(parse_json(text)))
    assert record is not None
    assert rank_state is not None
    return record, rank_state, state
