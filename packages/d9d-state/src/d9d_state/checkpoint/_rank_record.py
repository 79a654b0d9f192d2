"""Record of one rank's part of a checkpoint in a tier: the rank's share of the manifest, written after the data.

A step is complete if the record and the files of every rank are on some host. No other file marks a step as complete,
so the ranks do not exchange digests in a save. `Manifest.joined` computes the manifest from the shares.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Self, final

from d9d_dist import UserError
from d9d_state._member import read_member
from d9d_state.checkpoint.manifest import Manifest, with_digest, without_digest
from d9d_state.errors import as_state_error
from d9d_state.json_value import as_object


@final
@dataclass(frozen=True, slots=True)
class RankRecord:
    """Record of a rank's part: a manifest with only this rank's chunks and files.

    `save_id` is equal on all ranks. A step that was saved again, after a restart, has another id.
    """

    save_id: str
    rank: int
    share: Manifest

    def dump(self) -> bytes:
        """Encode the record as canonical JSON, including its own digest."""
        return with_digest({"save_id": self.save_id, "rank": self.rank, "share": self.share.body()})

    @classmethod
    def parse(cls, data: bytes) -> Self:
        """Parse a record; raise `StateError` if it is damaged."""
        with as_state_error("the record is damaged", (ValueError, KeyError, TypeError)):
            body = without_digest(data)
            save_id, rank = body["save_id"], body["rank"]
            if not isinstance(save_id, str) or not isinstance(rank, int):
                raise TypeError("expected a save id and a rank.")
            return cls(save_id, rank, Manifest.of_body(as_object(body["share"])))

    @classmethod
    def read(cls, folder: Path, name: str) -> Self:
        """Read a record from a folder; raise `StateError` if it is missing or damaged."""
        with as_state_error(errors=(UserError, OSError)):
            return cls.parse(read_member(folder, name))


def record_name(rank: int) -> str:
    """Return the name of the file with a rank's record."""
    return f"record-{rank:05d}.json"
