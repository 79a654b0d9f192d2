"""Frames of a traceback that belong to the user's own code: neither to d9d nor to an installed package."""

import sys
import sysconfig
import traceback
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

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
    return [frame for frame in frames[ours[0] :] if _is_users(frame.filename)] if ours else []


@contextmanager
def explained(what: str) -> Generator[None]:
    """Convert exceptions of the user's code in the body to a `UserError` that names the user's lines.

    Exceptions without a frame of the user's code propagate unchanged.

    Args:
        what: Start of the message, such as "the job cannot be built".
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        frames = user_frames(error)
        if not frames:
            raise
        lines = [f"{what}: {type(error).__name__}: {error}"]
        lines += [f"  {describe_frame(frame)}" for frame in reversed(frames)]
        raise UserError("\n".join(lines)) from error


def describe_frame(frame: traceback.FrameSummary) -> str:
    """Return file, line, function and source line of a frame."""
    return f"{shown_path(frame.filename)}, line {frame.lineno}, in {frame.name}: {frame.line}"


def shown_path(name: str) -> str:
    """Return a path relative to the current folder, if it lies below."""
    path = Path(name)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else name


def _is_d9d(name: str) -> bool:
    return any(Path(name).is_relative_to(folder) for folder in _d9d_folders())


def _d9d_folders() -> list[Path]:
    files = [module.__file__ for name, module in list(sys.modules.items()) if name.startswith("d9d_")]
    return [Path(file).parent for file in files if file is not None and file.endswith("__init__.py")]


def _is_users(name: str) -> bool:
    path = Path(name)
    is_library = path.is_relative_to(sysconfig.get_path("stdlib")) or bool(_INSTALLED & set(path.parts))
    return path.is_absolute() and not is_library and not _is_d9d(name)
