"""Where the main thread of a rank is: in which collective, called from where; read from its stack by another thread."""

import linecache
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist

_TORCH = str(Path(torch.__file__).parent)
_DISTRIBUTED = str(Path(dist.__file__).parent)
# The files of the functions that people call collectives, as against the wrappers around them.
_COLLECTIVES = ("distributed_c10d.py", "_functional_collectives.py")
_RANKS_SHOWN = 16


@dataclass(frozen=True, slots=True)
class RankPlace:
    """What a rank was doing when it was asked.

    Attributes:
        step: The step it works on, counted from 1; 0 before the first.
        doing: The part of the step or of the job, such as "a step".
        collective: The collective that it is in, with the ranks that take part, or `None`.
        at: The innermost line outside of torch.
    """

    step: int
    doing: str
    collective: str | None
    at: str

    def describe(self) -> str:
        """As a part of a sentence that begins with the rank."""
        what = "in no collective" if self.collective is None else f"in {self.collective}"
        return f"in {self.doing}, step {self.step}, {what}, at {self.at}"

    def as_json(self) -> dict[str, str | int | None]:
        """For `RankPlace(**...)` on another rank."""
        return asdict(self)


def main_thread_place(step: int, doing: str) -> RankPlace:
    """Where the main thread of this process is now. May be called from any thread; the main one need not answer."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    frames = list(_outwards(frame))
    outside = [frame for frame in frames if not frame.f_code.co_filename.startswith(_TORCH)]
    return RankPlace(step, doing, _collective(frames), _describe(outside[0]) if outside else "an unknown line")


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _collective(frames: list[FrameType]) -> str | None:
    """The innermost function of `torch.distributed` on the stack, the well-known ones first."""
    distributed = [frame for frame in frames if frame.f_code.co_filename.startswith(_DISTRIBUTED)]
    named = [frame for frame in distributed if frame.f_code.co_filename.endswith(_COLLECTIVES)]
    if not distributed:
        # A collective that was started before is waited for in native code: only the line that calls it tells.
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
