"""Frames of a traceback that belong to the user's own code: neither to d9d nor to an installed package."""

import sys
import sysconfig
import traceback
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import CodeType

from d9d_dist import UserError

_INSTALLED = {"site-packages", "dist-packages"}
_WRAPPERS = {"cli_main", "explained"}
"""Context managers of d9d. d9d does not call the user's code in the body of their `with` statements."""


def user_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Return the frames of the user's code that d9d called, outermost first; empty if there are none.

    The frames of a script that calls d9d are excluded, because the error is not in the script.
    """
    frames = traceback.extract_tb(error.__traceback__)
    ours = [index for index, frame in enumerate(frames) if _is_d9d(frame.filename) and frame.name not in _WRAPPERS]
    return [frame for frame in frames[ours[0] :] if is_users(frame.filename)] if ours else []


@contextmanager
def explained(what: str) -> Generator[None]:
    """Convert exceptions of the user's code in the body to a `UserError` that names the user's lines.

    Exceptions without a frame of the user's code propagate unchanged. `what` is the start of the message.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        frames = user_frames(error)
        if not frames:
            raise
        raise UserError("\n".join([f"{what}: {type(error).__name__}: {error}", *describe_frames(frames)])) from error


def describe_frames(frames: Sequence[traceback.FrameSummary]) -> list[str]:
    """Return an indented line for each frame, innermost first."""
    return [f"  {describe_frame(frame)}" for frame in reversed(frames)]


def describe_frame(frame: traceback.FrameSummary) -> str:
    """Return file, line, function and source line of a frame. Files below the current folder have relative paths."""
    path = Path(frame.filename)
    shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return f"{shown}, line {frame.lineno}, in {frame.name}: {frame.line}"


def describe_place(code: CodeType, line: int) -> str:
    """Return file, line, function and source line of running code."""
    return describe_frame(traceback.FrameSummary(code.co_filename, line, code.co_name))


def _is_d9d(name: str) -> bool:
    files = [str(module.__file__) for name, module in list(sys.modules.items()) if name.startswith("d9d_")]
    return any(Path(name).is_relative_to(Path(file).parent) for file in files if file.endswith("__init__.py"))


def is_users(name: str) -> bool:
    """Return True for a file of the user's code."""
    path = Path(name)
    is_library = path.is_relative_to(sysconfig.get_path("stdlib")) or bool(_INSTALLED & set(path.parts))
    return path.is_absolute() and not is_library and not _is_d9d(name)
