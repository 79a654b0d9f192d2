"""Location of a rank's main thread: its collective and the calling line, read from its stack by any thread."""

import linecache
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist

_TORCH = str(Path(torch.__file__).parent)
_DISTRIBUTED = str(Path(dist.__file__).parent)
# Files with the public collective functions; other files of torch.distributed contain wrappers.
_COLLECTIVES = ("distributed_c10d.py", "_functional_collectives.py")
_RANKS_SHOWN = 16


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
    """Return the current location of this process's main thread.

    May be called from any thread, even while the main thread is blocked.
    """
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    frames = list(_outwards(frame))
    outside = [frame for frame in frames if not frame.f_code.co_filename.startswith(_TORCH)]
    return RankPlace(step, doing, _collective(frames), _describe(outside[0]) if outside else "an unknown line")


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


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
    return frame.f_code.co_name + ("" if ranks is None else f" over ranks {_shorten(ranks)}")


def _shorten(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:_RANKS_SHOWN]))
    return shown + (f" and {len(ranks) - _RANKS_SHOWN} more" if ranks[_RANKS_SHOWN:] else "")


def _describe(frame: FrameType) -> str:
    path = Path(frame.f_code.co_filename)
    return f"{path.parent.name}/{path.name}:{frame.f_lineno} ({frame.f_code.co_qualname})"
