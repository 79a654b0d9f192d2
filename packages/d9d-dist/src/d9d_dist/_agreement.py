"""Check that all ranks have the same configuration, by comparing digests."""

import hashlib
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress

import torch
import torch.distributed as dist

from d9d_dist.errors import UserError

_DIGEST_BYTES = 32
_RANKS_SHOWN = 8


def check_agreement(name: str, value: str | bytes, *, device: torch.device) -> None:
    """Check that a value is equal on all ranks. Collective over all ranks: one all-gather of 32 bytes per rank.

    Args:
        name: Name of the value, for the error message.
        value: This rank's value. Only its digest is sent.
        device: Device on which this rank runs collectives.

    Raises:
        UserError: On every rank, with the same message, if the values differ.
    """
    content = value.encode() if isinstance(value, str) else value
    digest = hashlib.blake2b(content, digest_size=_DIGEST_BYTES, person=b"d9d").digest()
    mine = torch.frombuffer(bytearray(digest), dtype=torch.int64).to(device)
    gathered = mine.new_empty(dist.get_world_size() * mine.numel())
    dist.all_gather_into_tensor(gathered, mine)
    words = gathered.view(-1, mine.numel())
    if torch.equal(words, words[:1].expand_as(words)):
        return
    with suppress(RuntimeError):  # no rank exits and closes its connections before all have raised
        dist.barrier(device_ids=None if device.type == "cpu" else [device.index])
    raise UserError(_describe(name, [tuple(row) for row in words.tolist()]))


def _describe(name: str, digests: Sequence[tuple[int, ...]]) -> str:
    counts = Counter(digests)
    # The most common digest; on a tie that of the lowest rank, because max returns the first of equals.
    reference = max(digests, key=lambda digest: counts[digest])
    odd = [rank for rank, digest in enumerate(digests) if digest != reference]
    shown = ", ".join(map(str, odd[:_RANKS_SHOWN])) + (f" and {len(odd) - _RANKS_SHOWN} more" if odd[8:] else "")
    return (
        f"{name} differs between the {len(digests)} ranks: rank{'s' if odd[1:] else ''} {shown} "
        f"differ{'' if odd[1:] else 's'} from rank {digests.index(reference)}; expected equal values. Start all "
        "ranks with the same code, configuration and arguments."
    )
