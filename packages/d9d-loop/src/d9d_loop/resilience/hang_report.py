"""Search for the missing ranks of a hang, from the place of the main thread of each rank: step, collective and line."""

import linecache
import sys
import threading
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from traceback import walk_stack
from types import FrameType
from typing import NamedTuple

import torch
import torch.distributed as dist

from d9d_dist.collectives.consensus import name_ranks
from d9d_dist.failures.first_failure import Failure

_TORCH = str(Path(torch.__file__).parent)
_DISTRIBUTED = str(Path(dist.__file__).parent)
# Files with the public collective functions; other files of torch.distributed contain wrappers.
_COLLECTIVES = ("distributed_c10d.py", "_functional_collectives.py")


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Location of a rank's main thread at one moment.

    Attributes:
        step: Current step, counted from 1; 0 before the first step.
        collective: Name of the current collective, with the participating ranks if known, or `None`.
        at: Innermost line outside torch.
    """

    step: int
    doing: str
    collective: str | None
    at: str

    def describe(self) -> str:
        """Return a phrase for messages, to follow "rank N is"."""
        what = "in no collective" if self.collective is None else f"in {self.collective}"
        return f"in {self.doing}, step {self.step}, {what}, at {self.at}"


def main_thread_place(step: int, doing: str) -> RankPlace:
    """Return the current location of this process's main thread, even while that thread is blocked."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    frames = [] if frame is None else [each for each, _ in walk_stack(frame)]
    outside = [frame for frame in frames if not frame.f_code.co_filename.startswith(_TORCH)]
    return RankPlace(step, doing, _collective(frames), _describe(outside[0]) if outside else "an unknown line")


def _collective(frames: list[FrameType]) -> str | None:
    """Return the innermost `torch.distributed` function on the stack, preferring public collectives over wrappers."""
    distributed = [frame for frame in frames if frame.f_code.co_filename.startswith(_DISTRIBUTED)]
    named = [frame for frame in distributed if frame.f_code.co_filename.endswith(_COLLECTIVES)]
    if not distributed:
        # Waiting for an asynchronous collective happens in native code, so only the calling line identifies it.
        line = linecache.getline(frames[0].f_code.co_filename, frames[0].f_lineno) if frames else ""
        return "the wait for a collective" if ".wait(" in line else None
    frame = (named or distributed)[0]
    group = frame.f_locals.get("group")
    ranks = dist.get_process_group_ranks(group) if isinstance(group, dist.ProcessGroup | None) else None
    return frame.f_code.co_name + ("" if ranks is None else f" over {name_ranks(ranks)}")


def _describe(frame: FrameType) -> str:
    path = Path(frame.f_code.co_filename)
    return f"{path.parent.name}/{path.name}:{frame.f_lineno} ({frame.f_code.co_qualname})"


_SHOWN = 8


class HangReport(NamedTuple):
    """Reason for which a watchdog ends its process, and the rank that failed or is missing, if one stands out."""

    text: str
    culprit: Failure | None = None


def describe_hang(
    places: Mapping[int, RankPlace | None], *, seconds: float, states: Mapping[int, str] | None = None
) -> HangReport:
    """Return a report of the missing ranks and the location of each rank.

    The place of a rank that does not answer is `None`. `seconds` is the time without progress. `states` are known
    process states by rank, such as "its process 4711 on node-3 is stopped".
    """
    states = states or {}
    lines = [f"no progress for {seconds:.1f} s."]
    if len(places) == 1:
        lines += [f"The only rank is {place.describe()}." for place in places.values() if place]
        return HangReport("\n".join(lines))
    missing = missing_ranks(places)
    described: list[Failure] = []
    for rank in missing[:_SHOWN]:
        place = places[rank]
        if place is not None:
            described.append(Failure(rank, f"it is {place.describe()}."))
        else:
            why = states.get(
                rank, "its process is stopped or holds the GIL, or its host is down or cut off from the network"
            )
            described.append(Failure(rank, f"it does not answer; {why}."))
    lines += [f"Rank {each.rank} is missing: {each.text}" for each in described]
    if not missing:
        lines.append(
            "All ranks are at the same place: none is missing, so the network between the hosts may be at fault."
        )
    lines += _waiting({rank: place for rank, place in places.items() if place is not None and rank not in missing})
    return HangReport("\n".join(lines), described[0] if described else None)


def missing_ranks(places: Mapping[int, RankPlace | None]) -> list[int]:
    """Return the ranks that the other ranks wait for; empty if all ranks are at the same location.

    The first of these rules that finds any ranks applies:

    1. Ranks that do not answer.
    2. Ranks at an earlier step than the latest.
    3. Ranks in no collective, while other ranks are in a collective.
    4. Ranks at the location with the fewest ranks.
    """
    known = {rank: place for rank, place in places.items() if place is not None}
    silent = [rank for rank, place in places.items() if place is None]
    if silent or not known:
        return silent
    newest = max(place.step for place in known.values())
    if behind := [rank for rank, place in known.items() if place.step < newest]:
        return behind
    if outside := _part(known, [rank for rank, place in known.items() if place.collective is None]):
        return outside
    counts = Counter((place.collective, place.at) for place in known.values())
    fewest = min(counts.values())
    return _part(known, [rank for rank, place in known.items() if counts[place.collective, place.at] == fewest])


def _part(known: Collection[int], ranks: list[int]) -> list[int]:
    """Return `ranks`, or an empty list if `ranks` contains all known ranks, so that no rank stands out."""
    return ranks if len(ranks) < len(known) else []


def _waiting(places: Mapping[int, RankPlace]) -> list[str]:
    ranks_by_place: dict[str, list[int]] = {}
    for rank, place in places.items():
        ranks_by_place.setdefault(place.describe(), []).append(rank)
    return [
        f"{name_ranks(ranks).capitalize()} wait{'' if ranks[1:] else 's'}: {place}."
        for place, ranks in ranks_by_place.items()
    ]
