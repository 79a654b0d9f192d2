"""A minimal checkpoint with several tensors and files, and a check of its content."""

from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from d9d_dist import DistributedContext
from d9d_state import CheckpointStore


def tensors(step: int) -> dict[str, Tensor]:
    """Return the content of a step's checkpoint; every value encodes the step."""
    return {"model.a": torch.full((3, 4), _value(step)), "optimizer.a.step": torch.tensor(_value(step))}


def _value(step: int) -> float:
    """Return a value that a dtype of lower precision would round."""
    return step / 3


def save(store: CheckpointStore, step: int, *, background: bool = False) -> None:
    """Save a step; in the background, wait for the thread."""
    store.save(step, tensors(step), state={"step": step}, rank_state=[step], background=background)
    store.wait()


def save_on_ranks(store: CheckpointStore, step: int, ctx: DistributedContext, *, background: bool = False) -> None:
    """Save a step with sharded tensors and rank-specific state."""
    mesh = ctx.mesh_for("dense")["dp_cp_shard"]
    whole = {name: tensor for name, tensor in tensors(step).items() if tensor.ndim}
    sharded = {
        name: DTensor.from_local(
            tensor.tensor_split(ctx.world_size)[ctx.rank], mesh, [Shard(0)], shape=tensor.shape, stride=tensor.stride()
        )
        for name, tensor in whole.items()
    }
    own = {f"model.of_rank_{ctx.rank}": torch.full((2,), _value(step))}
    shared = {name: tensor for name, tensor in tensors(step).items() if not tensor.ndim}
    store.save(
        step, {**sharded, **own, **shared}, state={"step": step}, rank_state=[step], background=background, ctx=ctx
    )
    store.wait()


def begin(folder: Path, *steps: int) -> None:
    """Save some steps."""
    for step in steps:
        save(CheckpointStore(folder), step)


def step_of_newest(store: CheckpointStore) -> int | None:
    """Load the newest checkpoint, check that all values are of one step, and return it; `None` if there is none."""
    info = store.newest()
    if info is None:
        return None
    loaded = {name: torch.full(each.shape, -1, dtype=each.dtype) for name, each in info.tensors.items()}
    assert loaded.keys() >= tensors(0).keys()
    store.load(info, loaded)
    assert info.state == {"step": info.step}
    assert {str(state) for state in info.rank_states} == {str([info.step])}
    for name, tensor in loaded.items():
        assert torch.all(tensor == torch.tensor(_value(info.step))), name
    return info.step


def assert_goes_on(store: CheckpointStore) -> None:
    """Check that a resumed job can save, and that all partial folders are deleted."""
    store.discard_partials()
    left = sorted(path.name for path in store.folder.iterdir()) if store.folder.exists() else []
    assert not [name for name in left if name.endswith(".partial")], left
    save(store, 9)
    assert step_of_newest(store) == 9
