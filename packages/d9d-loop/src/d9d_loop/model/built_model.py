"""Build of a model before it is sharded: on the CPU with its values, or on `meta` if the provider has `late_init`.

Every rank needs the structure before the job starts; only rank 0 needs the values, and only later. So the ranks of a
host build one after another, digest each tensor, and keep the structure on `meta`. Rank 0 builds again when the values
are distributed. A host never holds more than one whole copy of the model.
"""

import copy
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from d9d_dist import DistributedContext, StageInfo, UserError, agree, canonical_name
from d9d_dist.collectives.consensus import name_ranks
from d9d_dist.host_lock import host_lock
from d9d_dist.values.model_values import built_values, digest_values, move_to_meta
from d9d_dist.values.parameter_writes import written_tensors
from d9d_dist.values.seeds import seed_generators
from d9d_loop.isolation import isolated_random
from d9d_loop.model._skipped_draws import RefusedReads, SkippedDraws
from d9d_loop.model.model_provider import ModelProvider


@dataclass(frozen=True, slots=True)
class BuiltModel:
    """Model, or one stage of it, before it is sharded.

    Attributes:
        module: Module on `meta`; on the CPU with its values if `build_model` was called with `keep_values`.
        tensors: Parameters and buffers on `meta`, by canonical name.
        without_values: Names of the tensors that `build` left on `meta`, to be read from `initial_weights`.
        digests: CRC-32 of the values of all other tensors, or of the skipped operators that define them. Empty if
            `module` holds its values; None if `reset_parameters` will draw them.
    """

    module: nn.Module
    tensors: Mapping[str, Tensor]
    without_values: frozenset[str]
    digests: Mapping[str, int] | None


def build_model(provider: ModelProvider, stage: StageInfo, *, seed: int, keep_values: bool) -> BuiltModel:
    """Build a model, or one stage of it, to plan a job. Issues no collectives.

    The ranks of a host build one after another, unless the model is built on `meta` or keeps its values. With
    `keep_values`, the module stays on the CPU with its values, as in a job of one rank; otherwise only its structure is
    kept.

    Raises:
        UserError: If building on `meta` would lose values that the constructor sets, or a tensor has no values. Also if
            sharding could not restore the values tensor by tensor.
    """
    if provider.late_init:
        module = _build_on_meta(provider, stage)
        return BuiltModel(module, _on_meta(module), frozenset(), None)
    if keep_values:
        module, values = build_with_values(provider, stage, seed=seed)
        tensors = _on_meta(module)
        return BuiltModel(module, tensors, frozenset(tensors.keys() - values.keys()), {})
    with host_lock("build", f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"):
        module, digests = _build_and_digest(provider, stage, seed=seed)
        move_to_meta(module)
    tensors = _on_meta(module)
    return BuiltModel(module, tensors, frozenset(tensors.keys() - digests.keys()), digests)


def build_with_values(
    provider: ModelProvider, stage: StageInfo, *, seed: int
) -> tuple[nn.Module, Mapping[str, Tensor]]:
    """Build a model on the CPU from the job's seed; return it and its tensors by canonical name.

    The seed is set for torch, `random` and, if it is imported, NumPy. Their random states are restored afterwards. The
    returned tensors are the detached parameters and buffers, except those on `meta`. A tied tensor appears once.
    """
    with isolated_random("build"):
        seed_generators(seed)
        module = provider.build(stage)
    module.zero_grad()
    _set_own_modes(module)
    return module, built_values(module, ignore_meta=provider.initial_weights is not None)


def meta_copy(model: nn.Module) -> nn.Module:
    """Return a copy of a model with its parameters and buffers on `meta`."""
    memo: dict[int, Any] = {}
    for each in (*model.parameters(), *model.buffers()):
        # Not `empty_like`: values of the tensors may not be drawn yet (`SkippedDraws`).
        value = torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device="meta")
        is_parameter = isinstance(each, nn.Parameter)
        memo[id(each)] = nn.Parameter(value, requires_grad=each.requires_grad) if is_parameter else value
    return copy.deepcopy(model, memo)


def describe_tensors(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return dtype, shape and, for frozen parameters and buffers, the lack of gradients, by name."""
    return {
        name: f"{str(each.dtype).removeprefix('torch.')}{list(each.shape)}{'' if each.requires_grad else ' frozen'}"
        for name, each in tensors.items()
    }


def report_different_values(model: BuiltModel, ctx: DistributedContext) -> None:
    """Print on rank 0 the names of the tensors whose values differ between ranks.

    Collective over all ranks: an agreement check of the structure and an all-gather of 8 bytes per tensor. All ranks
    raise `UserError` if the structure differs.
    """
    agree(same={"the structure of the model": describe_tensors(model.tensors)})
    assert model.digests is not None
    mine = torch.tensor(list(model.digests.values()), dtype=torch.int64, device=ctx.device)
    digests = mine.new_empty(ctx.world_size * mine.numel())
    dist.all_gather_into_tensor(digests, mine)
    differs = digests.view(ctx.world_size, -1) != digests.view(ctx.world_size, -1)[:1]
    if ctx.is_main_process and differs.any():
        names = [name for name, odd in zip(model.digests, differs.any(0).tolist(), strict=True) if odd]
        ranks = [rank for rank, odd in enumerate(differs.any(1).tolist()) if odd]
        print(
            f"d9d: {name_ranks(ranks)} built other values than rank 0 for "
            f"{', '.join(names)}; the values on rank 0 are used. Draw them from torch's default generator, which is "
            "seeded equally on every rank."
        )


def _build_and_digest(provider: ModelProvider, stage: StageInfo, *, seed: int) -> tuple[nn.Module, dict[str, int]]:
    """Build a model and digest its tensors. Large random draws are skipped unless the model's code needs the values."""
    draws = SkippedDraws()
    try:
        with draws, RefusedReads(draws):
            module, values = build_with_values(provider, stage, seed=seed)
        if not draws.failed and not draws.has_others(values.values()):
            skipped = {name: draws.digest(value) for name, value in values.items()}
            drawn = digest_values({name: value for name, value in values.items() if skipped[name] is None})
            return module, {name: drawn.get(name, digest or 0) for name, digest in skipped.items()}
    except Exception:
        if not draws.failed:
            raise
    del draws
    module, values = build_with_values(provider, stage, seed=seed)
    return module, digest_values(values)


def _build_on_meta(provider: ModelProvider, stage: StageInfo) -> nn.Module:
    with torch.device("meta"), _Writes() as writes:
        module = provider.build(stage)
    _set_own_modes(module)
    tensors = [*module.named_parameters(), *module.named_buffers()]
    lost = [f"  {name} already has values" for name, tensor in tensors if not tensor.is_meta]
    lost += [f"  {name} is written to outside of reset_parameters" for name, tensor in tensors if writes.lost(tensor)]
    if lost:
        raise UserError(
            "the model is built on `meta`, and values that its constructor sets would be lost:\n"
            + "\n".join(lost)
            + "\nSet late_init = False (of the provider, or of FunctionProvider) to train from the values that "
            "the build sets, or set them in reset_parameters of the module that owns them."
        )
    return module


def _set_own_modes(model: nn.Module) -> None:
    """Call `train` of modules that override it, as a training loop does: some keep submodules in evaluation mode."""
    for module in model.modules():
        if module.training and type(module).train is not nn.Module.train:
            module.train()


_DRAWS = {torch.ops.aten.normal_.default, torch.ops.aten.uniform_.default}
"""Draws that change nothing on `meta`, where torch takes 0.2 ms for each."""


@final
class _Writes(TorchDispatchMode):
    """Dispatch mode that records for each storage whether `reset_parameters` did its last in-place write."""

    def __init__(self) -> None:
        super().__init__()
        self._by_storage: dict[int, tuple[torch.UntypedStorage, bool]] = {}

    def lost(self, tensor: Tensor) -> bool:
        """Return True if code outside of `reset_parameters` wrote last, and a reset cannot repeat it."""
        _, is_reset = self._by_storage.get(tensor.untyped_storage()._cdata, (None, True))
        return not is_reset

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for tensor in written_tensors(func, args, kwargs or {}):
            storage = tensor.untyped_storage()
            # The reference keeps the storage alive, so that its address is not reused.
            self._by_storage[storage._cdata] = (storage, _is_within_reset())
        if func in _DRAWS and args[0].is_meta:
            return args[0]
        return func(*args, **(kwargs or {}))


def _is_within_reset() -> bool:
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "reset_parameters":
            return True
        frame = frame.f_back
    return False


def _on_meta(module: nn.Module) -> dict[str, Tensor]:
    tensors = [*module.named_parameters(), *module.named_buffers()]
    return {
        canonical_name(name): torch.empty_like(tensor, device="meta", requires_grad=tensor.requires_grad)
        for name, tensor in tensors
    }
