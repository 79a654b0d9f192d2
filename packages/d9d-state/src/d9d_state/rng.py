"""Every random generator's state as JSON, so that a resumed job draws the numbers that it would have drawn."""

import random
import sys
from typing import Any

import torch

from d9d_dist import UserError
from d9d_state.json_value import JsonValue


def rng_state() -> JsonValue:
    """The state of Python's `random`, NumPy (if it is imported), torch on the CPU and on this rank's accelerator."""
    version, words, gauss = random.getstate()
    state: dict[str, JsonValue] = {
        "python": {"version": version, "words": list(words), "gauss": gauss},
        "torch": _hex(torch.get_rng_state()),
    }
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        state["accelerator"] = {
            "type": accelerator.type,
            "state": _hex(torch.get_device_module(accelerator).get_rng_state()),
        }
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, position, has_gauss, cached = numpy.random.get_state()
        state["numpy"] = {
            "kind": kind,
            "words": keys.tolist(),
            "position": position,
            "has_gauss": has_gauss,
            "cached": cached,
        }
    return state


def set_rng_state(state: JsonValue) -> None:
    """Set every generator to a state that `rng_state` gave.

    Nothing is set unless all of it is understood. A generator that is absent here, or was absent then, is left alone.

    Raises:
        UserError: If it is not such a state.
    """
    try:
        _set(state)
    except (KeyError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise UserError(
            f"got a random state that cannot be restored ({error}); expected what rng_state() gave."
        ) from error


def _set(state: JsonValue) -> None:
    # All of it is tried on generators that nobody uses, before the first that somebody uses is set.
    parts = _fields(state)
    python_state = _python_state(parts)
    random.Random().setstate(python_state)  # noqa: S311 - a trial, for its checks
    cpu_state = _bytes(parts["torch"])
    torch.Generator().set_state(cpu_state)
    numpy: Any = sys.modules.get("numpy")
    numpy_state = None if numpy is None or "numpy" not in parts else _numpy_state(_fields(parts["numpy"]), numpy)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None and "accelerator" in parts:
        saved = _fields(parts["accelerator"])
        if saved["type"] == accelerator.type:
            torch.get_device_module(accelerator).set_rng_state(_bytes(saved["state"]))
    random.setstate(python_state)
    torch.set_rng_state(cpu_state)
    if numpy_state is not None:
        numpy.random.set_state(numpy_state)


def _python_state(parts: dict[str, JsonValue]) -> tuple[Any, ...]:
    python = _fields(parts["python"])
    if not isinstance(python["gauss"], float | None):
        raise TypeError("expected a float or null as gauss")
    return python["version"], _words(python["words"]), python["gauss"]


def _numpy_state(saved: dict[str, JsonValue], numpy: Any) -> tuple[Any, ...]:
    words, position = _words(saved["words"]), saved["position"]
    # NumPy believes the position, and would read beyond the words.
    if not isinstance(position, int) or not 0 <= position <= len(words):
        raise ValueError(f"expected a position within the {len(words)} words of NumPy's generator")
    if not isinstance(saved["cached"], float):
        raise TypeError("expected a float as cached")
    state = (saved["kind"], numpy.array(words, dtype=numpy.uint32), position, saved["has_gauss"], saved["cached"])
    numpy.random.RandomState().set_state(state)
    return state


def _hex(state: torch.Tensor) -> str:
    return bytes(state.cpu().tolist()).hex()


def _bytes(value: JsonValue) -> torch.Tensor:
    if not isinstance(value, str):
        raise TypeError("expected hexadecimal text")
    return torch.frombuffer(bytearray.fromhex(value), dtype=torch.uint8)


def _fields(value: JsonValue) -> dict[str, JsonValue]:
    if not isinstance(value, dict):
        raise TypeError("expected an object")
    return dict(value)


def _words(value: JsonValue) -> tuple[int, ...]:
    if not isinstance(value, list | tuple):
        raise TypeError("expected a list of integers")
    words = tuple(word for word in value if type(word) is int)
    if len(words) != len(value):
        raise TypeError("expected a list of integers")
    return words
