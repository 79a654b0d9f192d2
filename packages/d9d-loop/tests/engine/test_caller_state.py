"""State of the caller in checkpoints: JSON and tensors, which may differ between ranks."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from opened_engines import opened, take_step
from torch import Tensor, nn

from d9d_dist import UserError
from d9d_dist.testing import run_ranks
from d9d_loop.engine.caller_state import decode_state, encode_state

DTYPES = [torch.bfloat16, torch.float64, torch.bool, torch.uint8, torch.complex128, torch.int64, torch.float8_e4m3fn]
LARGE = {"baseline": torch.zeros((16 << 20) + 1, dtype=torch.uint8)}


def _bits(tensor: Tensor) -> tuple[torch.dtype, torch.Size, list[int]]:
    return tensor.dtype, tensor.shape, tensor.detach().contiguous().view(-1).view(torch.uint8).tolist()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_each_dtype_keep_their_bits(dtype: torch.dtype) -> None:
    values = torch.arange(12).to(dtype).view(3, 4)
    for tensor in (values, values.T[1:], values[0, 0], values[:0]):
        (found,) = decode_state(encode_state((tensor,)))
        assert _bits(found) == _bits(tensor)
        assert found.untyped_storage().nbytes() == tensor.numel() * dtype.itemsize, "without the rest of a view"


def test_special_values_parameters_and_conjugates_keep_their_values() -> None:
    state = {"a": {"b": [torch.tensor([torch.nan, -0.0, torch.inf])]}, "c": nn.Parameter(torch.ones(2)), "d": 1.5}
    found = decode_state(encode_state(state))
    assert _bits(found["a"]["b"][0]) == _bits(state["a"]["b"][0])  # type: ignore[index]
    assert type(found["c"]) is Tensor
    assert found["d"] == 1.5
    conjugate = torch.tensor([1 + 2j]).conj()
    assert decode_state(encode_state(conjugate)).equal(conjugate)


def test_numbers_that_json_lacks_keep_their_values() -> None:
    state = {"best": -torch.inf, "all": [torch.inf, torch.nan, np.float64(torch.inf), np.float64(0.5)]}
    found = json.loads(json.dumps(encode_state(state), allow_nan=False))
    assert repr(decode_state(found)) == "{'best': -inf, 'all': [inf, nan, inf, 0.5]}"


@pytest.mark.parametrize("value", [np.arange(3), np.float32(1.0), np.int64(1)])
def test_arrays_and_reserved_keys_are_an_error(value: Any) -> None:
    with pytest.raises(
        UserError, match=r"of NumPy as state\['a'\] of a save; expected JSON and tensors. Pass torch.as_t"
    ):
        encode_state({"a": value})
    with pytest.raises(UserError, match=r"got the key 'd9d.tensor' or 'd9d.number' in state\[0\] of a save, which are"):
        encode_state([{"d9d.tensor": 1}])


def _save(folder: Path, kind: str) -> str:
    """Save a state of `kind`; return the error, or that of a value that `load` has changed."""
    with opened(folder) as engine:
        draws = torch.Generator().manual_seed(engine.ctx.rank if kind == "differs" else 0)
        torch.rand(3, generator=draws)
        rank = engine.ctx.rank
        state: dict[str, Any] = {"generator": draws.get_state(), "prompts": 7}
        take_step(engine)
        try:
            engine.save(LARGE if kind == "large" and rank == engine.ctx.world_size - 1 else state, background=True)
        except UserError as error:
            return str(error)
        expected = torch.rand(3, generator=draws)  # not a part of the save
        loaded = engine.load()
        draws.set_state(loaded["generator"])
        assert torch.rand(3, generator=draws).equal(expected)
        assert loaded["prompts"] == 7
    return ""


def _load(folder: Path) -> str:
    with opened(folder) as engine:
        try:
            return "" if engine.load()["generator"].dtype == torch.uint8 else "another dtype"
        except UserError as error:
            return str(error)


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_state_of_a_generator_continues_on_each_rank(world_size: int, tmp_path: Path) -> None:
    assert run_ranks(_save, tmp_path, "differs", world_size=world_size) == [""] * world_size


@pytest.mark.parametrize(("kind", "message"), [("equal", ""), ("differs", "the checkpoint has a state of the caller")])
def test_only_equal_tensors_are_loaded_on_another_mesh(kind: str, message: str, tmp_path: Path) -> None:
    run_ranks(_save, tmp_path, kind, world_size=2)
    (found,) = run_ranks(_load, tmp_path, world_size=1)
    assert found.startswith(message)
    assert bool(found) is bool(message)


def test_large_tensors_of_one_rank_are_an_error_on_all(tmp_path: Path) -> None:
    for found in run_ranks(_save, tmp_path, "large", world_size=2):
        assert "got tensors of 16777217 bytes in the state of a save; expected at most 16777216" in found
        assert "Register large tensors as buffers of the model, or save them in a file of your own" in found
