"""Build of a model before it is sharded: on the CPU with its values, or on `meta` if the provider has `late_init`.

Every rank needs the structure before the job starts; only rank 0 needs the values, and only later. So each rank builds
on `meta` where it can, and initial values cost neither time nor memory. If the build needs the values, the ranks of a
host build one after another on the CPU, and keep the structure. Rank 0 builds again when the values are distributed.
A host never holds more than one whole copy of the model.
"""

import copy
import os
import sys
import weakref
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Self, final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from d9d_dist import StageInfo, UserError, canonical_name
from d9d_dist.host_lock import host_lock
from d9d_dist.values.model_values import built_values, move_to_meta
from d9d_dist.values.parameter_writes import written_tensors
from d9d_dist.values.seeds import seed_generators
from d9d_loop.isolation import isolated_random
from d9d_loop.model.model_provider import ModelProvider


@dataclass(frozen=True, slots=True)
class BuiltModel:
    """Model, or one stage of it, before it is sharded.

    Attributes:
        module: Module on `meta`; on the CPU with its values if `build_model` was called with `keep_values`.
        tensors: Parameters and buffers on `meta`, by canonical name.
        without_values: Names of the tensors that `build` left on `meta`, to be read from `initial_weights`.
    """

    module: nn.Module
    tensors: Mapping[str, Tensor]
    without_values: frozenset[str]


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
        return BuiltModel(module, _on_meta(module), frozenset())
    if keep_values:
        return _described(*build_with_values(provider, stage, seed=seed))
    with host_lock("build", f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"):
        built = _build_structure(provider, stage, seed=seed)
        built = built or _described(*build_with_values(provider, stage, seed=seed))
        move_to_meta(built.module)
    return built


def build_with_values(
    provider: ModelProvider, stage: StageInfo, *, seed: int
) -> tuple[nn.Module, Mapping[str, Tensor]]:
    """Build a model on the CPU from the job's seed; return it and its tensors by canonical name.

    The seed is set for torch, `random` and, if it is imported, NumPy. Their random states are restored afterwards. The
    returned tensors are the detached parameters and buffers, except those on `meta`. A tied tensor appears once.
    """
    module = _build_seeded(provider, stage, seed=seed)
    return module, built_values(module, ignore_meta=provider.initial_weights is not None)


def meta_copy(model: nn.Module) -> nn.Module:
    """Return a copy of a model with its parameters and buffers on `meta`."""
    memo: dict[int, Any] = {}
    for each in (*model.parameters(), *model.buffers()):
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


def _described(module: nn.Module, values: Mapping[str, Tensor]) -> BuiltModel:
    tensors = _on_meta(module)
    return BuiltModel(module, tensors, frozenset(tensors.keys() - values.keys()))


def _build_seeded(
    provider: ModelProvider, stage: StageInfo, *, seed: int, within: AbstractContextManager[object] | None = None
) -> nn.Module:
    with isolated_random("build"):
        seed_generators(seed)
        with within or nullcontext():
            module = provider.build(stage)
    module.zero_grad()
    _set_own_modes(module)
    return module


def _build_structure(provider: ModelProvider, stage: StageInfo, *, seed: int) -> BuiltModel | None:
    """Build a model without values; return `None` if it must be built with them.

    That is if the build raises, because it reads values or for any other reason, or if tensors other than parameters
    and buffers lack their values. Also if the build draws random numbers, or itself creates tensors on `meta`.
    """
    if provider.initial_weights is not None:
        return None
    mode = _FilledOnMeta()
    try:
        module = _build_seeded(provider, stage, seed=seed, within=mode)
        built_values(module, ignore_meta=True)
    except Exception:
        return None
    if mode.needs_values or mode.holds_others([*module.parameters(), *module.buffers()]):
        return None
    return BuiltModel(module, _on_meta(module), frozenset())


_FILLED = {torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn}


@final
class _FilledOnMeta(TorchFunctionMode):
    """Function mode that creates constant, uninitialized and random tensors on `meta` instead of the CPU.

    Attributes:
        needs_values: True if an operation failed, or if code draws random numbers on the CPU. They differ from those of
            a build with values, because draws on `meta` do not advance the generator.
    """

    def __init__(self) -> None:
        super().__init__()
        self.needs_values = False
        self._made: list[weakref.ref[Tensor]] = []

    def holds_others(self, registered: Iterable[Tensor]) -> bool:
        """Return True if a tensor on `meta` is alive that is not one of the `registered` ones."""
        known = {id(each) for each in registered}
        return any((tensor := each()) is not None and id(tensor) not in known for each in self._made)

    def __enter__(self) -> Self:
        self._seeded = torch.get_rng_state()
        return super().__enter__()

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        super().__exit__(exc_type, exc_val, exc_tb)
        self.needs_values |= not torch.equal(self._seeded, torch.get_rng_state())

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        devices = {str(each) for each in (*args, *kwargs.values()) if isinstance(each, str | torch.device)}
        if func in _FILLED and devices <= {"cpu"}:
            kwargs = {**kwargs, "device": "meta"}
        try:
            if "meta" in devices and func in {*_FILLED, Tensor.to}:
                raise RuntimeError("the build itself creates a tensor on meta")  # ends it before it reads weights
            result = func(*args, **kwargs)
        except Exception:  # the code may catch it
            self.needs_values = True
            raise
        self._made += [weakref.ref(each) for each in pytree.tree_leaves(result) if _is_on_meta(each)]
        return result


def _is_on_meta(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_meta


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
