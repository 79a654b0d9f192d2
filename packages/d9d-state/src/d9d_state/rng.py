"""State of all random number generators as JSON, so that a resumed job continues the same random sequences."""

import random
import sys
from typing import Any

import torch

from d9d_dist import UserError
from d9d_state.json_value import JsonValue, as_list, as_object


def rng_state() -> JsonValue:
    """Return the state of Python's `random`, NumPy (if imported), torch's CPU generator and this rank's accelerator."""
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
    """Restore the generator states that `rng_state` returned.

    The whole state is validated before any generator is changed. A generator that is missing in the saved state stays
    unchanged; the saved state of a generator that is missing in this process is ignored.

    Raises:
        UserError: If `state` was not returned by `rng_state`, or is damaged.
    """
    try:
        _set(state)
    except (KeyError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise UserError(
            f"got an invalid random state ({error}); expected the value that rng_state() returned."
        ) from error


def _set(state: JsonValue) -> None:
    # Validate each state on a temporary generator before any global generator is set.
    parts = as_object(state)
    python = as_object(parts["python"])
    if not isinstance(python["gauss"], float | None):
        raise TypeError("expected a float or null for gauss")
    python_state: Any = python["version"], _words(python["words"]), python["gauss"]
    random.Random().setstate(python_state)  # noqa: S311 - temporary, only for validation
    cpu_state = _bytes(parts["torch"])
    torch.Generator().set_state(cpu_state)
    numpy: Any = sys.modules.get("numpy")
    numpy_state = None if numpy is None or "numpy" not in parts else _numpy_state(as_object(parts["numpy"]), numpy)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None and "accelerator" in parts:
        saved = as_object(parts["accelerator"])
        if saved["type"] == accelerator.type:
            torch.get_device_module(accelerator).set_rng_state(_bytes(saved["state"]))
    random.setstate(python_state)
    torch.set_rng_state(cpu_state)
    if numpy_state is not None:
        numpy.random.set_state(numpy_state)


def _numpy_state(saved: dict[str, JsonValue], numpy: Any) -> tuple[Any, ...]:
    words, position = _words(saved["words"]), saved["position"]
    # NumPy does not check the position, and would read out of bounds.
    if not isinstance(position, int) or not 0 <= position <= len(words):
        raise ValueError(f"expected a position from 0 to {len(words)} for NumPy's generator")
    if not isinstance(saved["cached"], float):
        raise TypeError("expected a float for cached")
    state = (saved["kind"], numpy.array(words, dtype=numpy.uint32), position, saved["has_gauss"], saved["cached"])
    numpy.random.RandomState().set_state(state)
    return state


def _hex(state: torch.Tensor) -> str:
    return bytes(state.cpu().tolist()).hex()


def _bytes(value: JsonValue) -> torch.Tensor:
    if not isinstance(value, str):
        raise TypeError("expected hexadecimal text")
    return torch.frombuffer(bytearray.fromhex(value), dtype=torch.uint8)


def _words(value: JsonValue) -> tuple[Any, ...]:
    words = as_list(value)
    if any(type(word) is not int for word in words):
        raise TypeError("expected a list of integers")
    return tuple(words)
