"""Writes to a local tier: a rank's part, and the replicas of other hosts' parts.

A tier has two slots. A save overwrites the slot of the second-last step in place, so that neither memory nor disk space
is allocated again. The last step stays complete until the new step is complete on every host.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor

from d9d_dist import DistributedContext
from d9d_state import _files
from d9d_state._digests import PartRecord
from d9d_state._ranks import failing_together, rank_of
from d9d_state._tensor_bytes import bytes_of
from d9d_state.checkpoint._commit import SaveJob, share_of_rank
from d9d_state.checkpoint._hosts import Hosts
from d9d_state.checkpoint._rank_record import RankRecord, record_name
from d9d_state.checkpoint.manifest import STATE_NAME, rank_state_name, tensors_name
from d9d_state.checkpoint.save_plan import SavePlan, part_key
from d9d_state.json_value import dump_json
from d9d_state.safetensors_file import FileLayout, SafetensorsRecord
from d9d_state.tensor_info import TensorInfo

SLOTS = ("slot-0", "slot-1")
_BLOCK = 1 << 28  # bytes of one message


@final
class TierWriter:
    """Writer of this rank's part and of the replicas that this rank keeps. `slot` names the folder of the next save.

    `life` is a random id, equal on all ranks: the prefix of this writer's save ids. `group` is a Gloo group
    of all ranks; `None` for one process.
    """

    def __init__(
        self,
        folder: Path,
        hosts: Hosts,
        *,
        replicas: int,
        life: str,
        ctx: DistributedContext | None,
        group: dist.ProcessGroup | None,
    ) -> None:
        self._folder, self._life, self._ctx, self._group, self._rank = folder, life, ctx, group, rank_of(ctx)
        self._peers = hosts.replica_ranks(self._rank, replicas)
        self._sources = hosts.replicated(self._rank, replicas)
        self.slot = SLOTS[0]
        self._layouts: dict[int, FileLayout] = {}
        self._plan_digest = ""
        self._images: dict[Path, Tensor] = {}
        self.num_bytes_sent = 0

    def write(self, job: SaveJob, parts: Mapping[str, Tensor], wait_copied: Callable[[], None]) -> None:
        """Write a step, which is complete on all hosts when this method returns. Collective.

        `parts` must not change between the return of `wait_copied` and the return of this method. Raises `StateError`
        on every rank if a rank cannot write, or its `wait_copied` raises an error.
        """
        slot, images = self._folder / self.slot, dict[int, Tensor]()
        failed = f"step {job.step} could not be saved in {slot}"
        with failing_together(self._ctx, failed, errors=Exception, group=self._group):
            wait_copied()
            images = self._prepare(slot, job.plan)
            self._fill(images[self._rank], parts)
        data = {rank: image[len(self._layouts[rank].header) :] for rank, image in images.items()}
        own, texts = data.pop(self._rank), b""
        transfers = self._start_transfers(own, data)
        self.num_bytes_sent += own.nbytes * len(self._peers)
        with failing_together(self._ctx, failed, errors=Exception, group=self._group):
            try:
                texts = self._texts(job, images[self._rank])
            finally:
                wait_all(transfers)
        received = self._exchange(texts)
        with failing_together(self._ctx, failed, group=self._group):
            for rank, text in received.items():
                part = json.loads(text)
                write_states(slot, rank, part)
                _files.fsync(slot / tensors_name(rank))
                _files.fsync(slot)
                # Last: the record completes the rank's part.
                _files.replace_file(slot / record_name(rank), part["record"].encode())
                _files.fsync(slot)
        self.slot = SLOTS[1 - SLOTS.index(self.slot)]
        with suppress(OSError):  # the next save, which overwrites the slot of the previous step, tries again
            for rank in images:
                _files.remove_file(self._folder / self.slot / record_name(rank))

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
            path = slot / tensors_name(rank)
            if path not in self._images:
                self._images[path] = _files.map_file(path, layout.num_bytes)
            images[rank] = self._images[path]
            images[rank][: len(layout.header)] = torch.frombuffer(bytearray(layout.header), dtype=torch.uint8)
        return images

    def _fill(self, image: Tensor, parts: Mapping[str, Tensor]) -> None:
        starts = self._layouts[self._rank].starts
        for key, part in parts.items():
            image[starts[key] : starts[key] + part.nbytes].view(part.dtype).view(part.shape).copy_(part)

    def _start_transfers(self, own: Tensor, received: Mapping[int, Tensor]) -> list[dist.Work | None]:
        """Start to send a tensor to this rank's peers, and to receive the tensors of its sources, by rank."""
        receives = [(dist.irecv, rank, received[rank]) for rank in self._sources]
        return [
            transfer(block, rank, group=self._group)
            for transfer, rank, data in (*receives, *((dist.isend, rank, own) for rank in self._peers))
            for block in data.split(_BLOCK)
            if len(block)
        ]

    def _texts(self, job: SaveJob, image: Tensor) -> bytes:
        """Hash this rank's file; return its record and state, and on rank 0 the shared state, as JSON."""
        layout, rank = self._layouts[self._rank], self._rank
        view = bytes_of(image)
        header, *records = (
            PartRecord.of(view[start:end]) for start, end in pairwise([0, *layout.starts.values(), layout.num_bytes])
        )
        written = SafetensorsRecord(header, dict(zip(layout.starts, records, strict=True)))
        share = share_of_rank(job, rank, written, PartRecord.of(job.rank_state), PartRecord.of(job.state))
        record = RankRecord(f"{self._life}-{job.step}", rank, share).dump()
        texts = {"record": record, "rank_state": job.rank_state, **({"state": job.state} if rank == 0 else {})}
        return dump_json({name: text.decode() for name, text in texts.items()})

    def _exchange(self, texts: bytes) -> dict[int, bytes]:
        """Send this rank's record and state to its peers; return its own and those of the replicas that it keeps."""
        sizes = {rank: torch.zeros(1, dtype=torch.int64) for rank in self._sources}
        wait_all(self._start_transfers(torch.tensor([len(texts)]), sizes))
        others = {rank: torch.empty(int(size), dtype=torch.uint8) for rank, size in sizes.items()}
        wait_all(self._start_transfers(torch.frombuffer(bytearray(texts), dtype=torch.uint8), others))
        return {self._rank: texts, **{rank: bytes(bytes_of(each)) for rank, each in others.items()}}


def _layout(plan: SavePlan, rank: int) -> FileLayout:
    parts = plan.parts[rank]
    return FileLayout.of(
        {part_key(name, region): TensorInfo(region.sizes, plan.tensors[name].dtype) for name, region in parts}
    )


def write_states(slot: Path, rank: int, texts: Mapping[str, str]) -> None:
    """Write the `rank_state` of a rank, and the shared `state`, if any, unless the files have this content."""
    for key, name in (("rank_state", rank_state_name(rank)), ("state", STATE_NAME)):
        data = texts.get(key, "").encode()
        if key in texts and not ((slot / name).is_file() and (slot / name).read_bytes() == data):
            _files.replace_file(slot / name, data)


def wait_all(works: Iterable[dist.Work | None]) -> None:
    """Wait for transfers; `None` is a transfer that this rank takes no part in."""
    for work in works:
        if work is not None:
            work.wait()
