"""Search of a local tier: the steps that are complete on the job's hosts, and the hosts that have each part."""

import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from d9d_dist import DistributedContext, UserError, gather_json, local_region
from d9d_state import _files
from d9d_state._member import read_member
from d9d_state._ranks import failing_together, rank_of
from d9d_state.checkpoint._hosts import Hosts
from d9d_state.checkpoint._rank_record import RankRecord, record_name
from d9d_state.checkpoint._tier_writer import SLOTS, wait_all, write_states
from d9d_state.checkpoint._verify import damage, num_threads, parts_of, share_of
from d9d_state.checkpoint.info import CheckpointInfo
from d9d_state.checkpoint.manifest import STATE_NAME, Manifest, rank_state_name, tensors_name
from d9d_state.errors import Errors, StateError, UnreadableError, as_state_error

_LOGGER = logging.getLogger("d9d.state")


@final
@dataclass(frozen=True, slots=True)
class TierStep:
    """Complete step of a tier.

    `holders` maps each rank that saved to the hosts that have the rank's part, each with the slot that holds the part.
    """

    step: int
    save_id: str
    num_ranks: int
    holders: dict[int, dict[int, str]] = field(default_factory=dict)

    def slot_of(self, host: int) -> str | None:
        """Return the slot in which a host has parts of the step, or `None`."""
        return next((slots[host] for slots in self.holders.values() if host in slots), None)


@final
@dataclass(frozen=True, slots=True)
class TierReader:
    """Reader of a local tier on one rank; all methods are collective."""

    folder: Path
    hosts: Hosts
    ctx: DistributedContext | None
    group: dist.ProcessGroup | None

    @property
    def _rank(self) -> int:
        return rank_of(self.ctx)

    @property
    def _host(self) -> int:
        return self.hosts.of(self._rank)

    @property
    def is_leader(self) -> bool:
        """True on one rank of each host."""
        return self.hosts.ranks[self._host][0] == self._rank

    def _gather(self, value: Any) -> list[Any]:
        return gather_json(value, self.group, alone=self.ctx is None)

    def _failing_together(self, what: str | None = None, errors: Errors = OSError) -> AbstractContextManager[None]:
        return failing_together(self.ctx, what, errors=errors, group=self.group)

    def steps(self, run_id: str) -> list[TierStep]:
        """Return the complete steps of a run, newest first; log the missing parts of incomplete steps."""
        records: list[tuple[str, RankRecord]] = []
        with self._failing_together(f"{self.folder} cannot be read"):
            records = self._records() if self.is_leader else []
        held = [
            {
                "step": record.share.step,
                "save_id": record.save_id,
                "num_ranks": record.share.num_ranks,
                "part": record.rank,
                "slot": slot,
            }
            for slot, record in records
            if record.share.run_id == run_id
        ]
        found: dict[tuple[int, str], TierStep] = {}
        for rank, of_rank in enumerate(self._gather(held)):
            for own in of_rank:
                key = own["step"], own["save_id"]
                each = found.setdefault(key, TierStep(*key, own["num_ranks"]))
                each.holders.setdefault(own["part"], {})[self.hosts.of(rank)] = own["slot"]
        complete: list[TierStep] = []
        for _, each in sorted(found.items(), reverse=True):
            if missing := sorted(set(range(each.num_ranks)) - each.holders.keys()):
                where = each.step, self.folder, missing
                _LOGGER.warning("skipping step %d in %s: no host has the parts of ranks %s", *where)
            else:
                complete.append(each)
        return complete

    def open(self, found: TierStep) -> "OpenStep | None":
        """Verify every part of a step, on another host if one copy is damaged. Copy the small files to every host.

        Returns `None` if every copy of a part is damaged.
        """
        chosen = self._verified(found)
        if chosen is None:
            return None
        slot = self.folder / self._make_slot(found)
        records: list[RankRecord] = []
        mine = [rank for rank, host in chosen.items() if self.hosts.spread(host, rank) == self._rank]
        texts: list[dict[str, str]] = []
        with self._failing_together(f"step {found.step} could not be read", errors=(UserError, OSError)):
            for rank in mine:
                names = {"record": record_name(rank), "rank_state": rank_state_name(rank)}
                names |= {"state": STATE_NAME} if rank == 0 else {}
                texts.append({key: read_member(slot, name).decode() for key, name in names.items()})
        gathered = self._gather(texts)
        with self._failing_together(f"{slot} could not be written"):
            for each in (each for of_rank in gathered for each in of_rank):
                records.append(RankRecord.parse(each["record"].encode()))
                if self.is_leader:
                    write_states(slot, records[-1].rank, each)
        manifest = Manifest.joined([record.share for record in sorted(records, key=lambda record: record.rank)])
        with as_state_error("the records of the ranks are inconsistent", ValueError):
            manifest.check()
        return OpenStep(CheckpointInfo(slot, manifest, is_verified=True), found, chosen)

    def fetch(self, step: "OpenStep", tensors: Mapping[str, Tensor]) -> None:
        """Copy the tensor files that this host needs but lacks from other hosts.

        A host needs the files with chunks of its ranks' shards. Raises `StateError` on every rank if a file arrives
        damaged or cannot be written.
        """
        manifest, slot = step.info.manifest, step.info.folder
        needed = sorted(_files_for(manifest, tensors))
        wanted: dict[int, set[str]] = {}
        for rank, names in enumerate(self._gather(needed)):
            wanted.setdefault(self.hosts.of(rank), set()).update(names)
        moves = [
            (tensors_name(part), self.hosts.spread(chosen, part), self.hosts.spread(host, part))
            for part, chosen in sorted(step.chosen.items())
            for host, names in sorted(wanted.items())
            if tensors_name(part) in names and host != chosen
        ]
        received: dict[str, Tensor] = {}
        with self._failing_together(f"{slot} cannot hold the parts of other hosts"):
            for name, _, target in moves:
                if target == self._rank:
                    received[name] = _files.map_file(slot / name, manifest.files[name].size)
        transfers: list[dist.Work | None] = []
        for name, source, target in moves:
            if target == self._rank:
                transfers.append(dist.irecv(received[name], source, group=self.group))
            elif source == self._rank:
                size = manifest.files[name].size
                data = torch.from_file(str(slot / name), shared=True, size=size, dtype=torch.uint8)
                transfers.append(dist.isend(data, target, group=self.group))
        wait_all(transfers)
        with self._failing_together():
            parts = [part for part in parts_of(manifest) if part.file in received]
            if problems := damage(slot, parts, threads=num_threads(self.ctx)):
                raise StateError("; ".join(problems))

    def forget_other_steps(self, kept: TierStep | None, *, since: int) -> str:
        """Delete the records of steps after `since`, and of other saves of the step of `kept`.

        Returns the slot to overwrite first. Steps after `since` are incomplete, or the job rolled back to an earlier
        step. Call this method on each rank, before a collective that precedes the first write.
        """
        left: list[tuple[str, RankRecord]] = []
        for slot, record in self._records():
            is_other = kept is not None and record.share.step == kept.step and record.save_id != kept.save_id
            if record.share.step <= since and not is_other:
                left.append((slot, record))
            elif self.is_leader:
                _files.remove_file(self.folder / slot / record_name(record.rank))
        return _oldest_slot(left)

    def _records(self) -> list[tuple[str, RankRecord]]:
        """Return the undamaged records in this host's slots whose files have the recorded sizes.

        Raises `UnreadableError` if a process limit prevents opening files.
        """
        found: list[tuple[str, RankRecord]] = []
        for slot in SLOTS:
            folder = self.folder / slot
            for path in sorted(folder.glob("record-*.json")):
                try:
                    record = RankRecord.read(folder, path.name)
                    for name, file in record.share.files.items():
                        if (folder / name).stat().st_size != file.size:
                            raise StateError(f"the size of {name} differs from its record.")
                    found.append((slot, record))
                except UnreadableError:
                    raise
                except (OSError, StateError) as reason:
                    _LOGGER.warning("skipping %s: %s", path, reason)
        return found

    def _verified(self, found: TierStep) -> dict[int, int] | None:
        """Choose a host for each part and verify all digests there; return the hosts by part.

        The host of the part's own rank is preferred. If a copy is damaged, the next host is chosen. Returns `None` if
        every copy of a part is damaged.
        """
        left = {
            part: sorted(slots, key=lambda host: (part not in self.hosts.ranks[host], host))
            for part, slots in found.holders.items()
        }
        sound: dict[int, int] = {}
        while len(sound) < len(left):
            for part, hosts in left.items():
                if not hosts:
                    _LOGGER.warning(
                        "skipping step %d in %s: every copy of rank %d's part is damaged", found.step, self.folder, part
                    )
                    return None
            mine = [part for part, hosts in left.items() if hosts[0] == self._host and part not in sound]
            problems: dict[int, str] = {}
            with self._failing_together():
                problems = self._damaged(found, mine)
            damaged: set[int] = set()
            for rank, of_rank in enumerate(self._gather(problems)):
                for part, text in of_rank.items():
                    _LOGGER.warning("rank %d: %s at step %d; trying another copy", rank, text, found.step)
                    damaged.add(int(part))
            sound |= {part: hosts[0] for part, hosts in left.items() if part not in damaged}
            for part in damaged:
                left[part].pop(0)
        return sound

    def _damaged(self, found: TierStep, parts: list[int]) -> dict[int, str]:
        """Verify this rank's share of the given parts on this host; return an error text for each damaged part."""
        ranks, slot = self.hosts.ranks[self._host], self.folder / str(found.slot_of(self._host))
        problems: dict[int, str] = {}
        for part in parts:
            try:
                pieces = parts_of(RankRecord.read(slot, record_name(part)).share)
            except UnreadableError:
                raise
            except StateError as error:
                problems[part] = str(error)
                continue
            mine = share_of(pieces, rank=ranks.index(self._rank), num_ranks=len(ranks))
            if texts := damage(slot, mine, threads=num_threads(self.ctx)):
                problems[part] = "; ".join(texts)
        return problems

    def _make_slot(self, found: TierStep) -> str:
        """Return this host's slot of a step; a host without parts reuses the slot of its older step. Collective."""
        slot = found.slot_of(self._host)
        choice = None
        with self._failing_together(f"{self.folder} could not be written"):
            if slot is None and self.is_leader:
                choice = _oldest_slot(self._records())
                _files.make_folder(self.folder / choice)
                for path in (self.folder / choice).glob("record-*.json"):
                    _files.remove_file(path)
        choices = self._gather(choice)
        return slot or str(choices[self.hosts.ranks[self._host][0]])


@final
@dataclass(frozen=True, slots=True)
class OpenStep:
    """Step of a tier with verified digests; `chosen` maps each part to the host from which the part is read."""

    info: CheckpointInfo
    found: TierStep
    chosen: Mapping[int, int]


def _oldest_slot(records: list[tuple[str, RankRecord]]) -> str:
    """Return the slot whose newest step is the oldest; an empty slot counts as oldest."""
    return min(SLOTS, key=lambda each: max((record.share.step for slot, record in records if slot == each), default=-1))


def _files_for(manifest: Manifest, tensors: Mapping[str, Tensor]) -> set[str]:
    """Return the files with chunks of this rank's shards."""
    names: set[str] = set()
    for name, tensor in tensors.items():
        region = local_region(tensor, name)
        names.update(chunk.file for chunk in manifest.tensors[name].chunks if region.intersect(chunk.region))
    return names
