"""The state that a caller of the engine saves: JSON in which tensors are allowed."""

import base64
import math
from collections.abc import Mapping
from typing import Any, cast

import torch
from pydantic import JsonValue
from torch import Tensor
from torch.distributed.tensor import DTensor

from d9d_dist import UserError

MAX_BYTES = 16 << 20
_KEY, _NUMBER = "d9d.tensor", "d9d.number"


def encode_state(state: Any) -> JsonValue:
    """Return a state in which each tensor is a dict with its dtype, shape and bytes; also infinite numbers and NaN.

    Raises:
        UserError: If a tensor is a `DTensor`, a value is an array of NumPy, a key is reserved, or all tensors together
            have more than `MAX_BYTES`.
    """
    tensors: list[Tensor] = []
    encoded = _encode(state, "state", tensors)
    if (size := sum(each.nbytes for each in tensors)) > MAX_BYTES:
        raise UserError(
            f"got tensors of {size} bytes in the state of a save; expected at most {MAX_BYTES} bytes on each rank, "
            "because each rank reads the states of all ranks. Register large tensors as buffers of the model, or save "
            "them in a file of your own and pass its path."
        )
    return encoded


def decode_state(state: JsonValue) -> Any:
    """Return the state that `encode_state` encoded; its tensors are on the CPU."""
    if isinstance(state, list):
        return [decode_state(each) for each in state]
    if isinstance(state, dict):
        if _KEY in state:
            return _decode_tensor(state)
        if _NUMBER in state:
            return float(cast("str", state[_NUMBER]))
        return {key: decode_state(each) for key, each in state.items()}
    return state


def _encode(value: Any, path: str, tensors: list[Tensor]) -> Any:
    if isinstance(value, DTensor):
        raise UserError(
            f"got a DTensor as {path} of a save; expected a plain tensor. Pass full_tensor() or to_local() of it."
        )
    if type(value).__module__ == "numpy" and not isinstance(value, float):
        raise UserError(
            f"got a {type(value).__name__} of NumPy as {path} of a save; expected JSON and tensors. Pass "
            "torch.as_tensor(array), or value.item() of a number."
        )
    if isinstance(value, Tensor):
        tensors.append(value)
        return _encode_tensor(value)
    if isinstance(value, float) and not math.isfinite(value):  # such as the best value so far before the first one
        return {_NUMBER: str(float(value))}
    if isinstance(value, Mapping):
        if value.keys() & {_KEY, _NUMBER}:
            raise UserError(f"got the key {_KEY!r} or {_NUMBER!r} in {path} of a save, which are reserved. Rename it.")
        return {key: _encode(each, f"{path}[{key!r}]", tensors) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_encode(each, f"{path}[{index}]", tensors) for index, each in enumerate(value)]
    return value


def _encode_tensor(tensor: Tensor) -> dict[str, JsonValue]:
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().reshape(-1).contiguous().clone()
    data = bytearray(flat.nbytes)
    if data:
        torch.frombuffer(data, dtype=torch.uint8).copy_(flat.view(torch.uint8))
    return {
        _KEY: base64.b64encode(data).decode(),
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
    }


def _decode_tensor(encoded: Mapping[str, Any]) -> Tensor:
    shape, dtype = encoded["shape"], getattr(torch, encoded["dtype"])
    data = bytearray(base64.b64decode(encoded[_KEY]))
    return torch.frombuffer(data, dtype=dtype).reshape(shape) if data else torch.empty(shape, dtype=dtype)
