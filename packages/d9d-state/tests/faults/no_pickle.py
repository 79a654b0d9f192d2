"""Disables unpickling in a process, to prove that nothing unpickles."""

import _pickle
import marshal
import pickle
import sys
from typing import Any, NoReturn

import torch
from torch.distributed import distributed_c10d

_READERS = ("load", "loads", "Unpickler", "_load", "_loads", "_Unpickler")


def forbid_unpickling() -> None:
    """Make unpickling fail for the rest of this process: an audit hook cannot be removed."""
    sys.addaudithook(_refuse_classes)
    places: list[tuple[Any, tuple[str, ...]]] = [
        (pickle, _READERS),
        (_pickle, _READERS[:3]),
        (marshal, ("load",)),
        (torch, ("load",)),
        (torch.serialization, ("load",)),
        (distributed_c10d, ("_unpickler",)),  # unpickler of torch's object collectives
    ]
    for module, names in places:
        for name in names:
            assert hasattr(module, name), f"{module.__name__} has no {name} any more: look for what does its work"
            setattr(module, name, _refuse)


def _refuse_classes(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "pickle.find_class":
        raise AssertionError(f"a pickle asks for {arguments}")


def _refuse(*_arguments: Any, **_options: Any) -> NoReturn:
    raise AssertionError("something is unpickled")
