"""Build a model before it has a layout: with its values where a function made them, or on `meta` where it chose that.

The structure is needed on every rank and before the job starts, the values on one rank and later. So ranks of one host
take turns to build, note a digest of each tensor, and keep the structure on `meta`; rank 0 builds once more when the
values are placed. At no time does a host hold more than one whole copy.
"""

import fcntl
import json
import os
import random
import sys
import tempfile
import zlib
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from d9d_dist import DistributedContext, StageInfo, UserError, built_values, canonical_name, digest_values, move_to_meta
from d9d_loop._skipped_draws import SkippedDraws
from d9d_loop.model_provider import ModelProvider
from d9d_loop.own_random import own_random


@dataclass(frozen=True, slots=True)
class BuiltModel:
    """A model, or a stage of it, as it was built.

    Attributes:
        module: The model: on the CPU with its values in a job of one rank that keeps them, else on `meta`.
        tensors: Its parameters and buffers on `meta`, by canonical name.
        without_values: Names of the tensors that `build` left to the provider's `initial_weights`.
        digests: CRC-32 of the values of all other tensors; None where `reset_parameters` will draw them.
    """

    module: nn.Module
    tensors: Mapping[str, Tensor]
    without_values: frozenset[str]
    digests: Mapping[str, int] | None


def build_model(provider: ModelProvider, stage: StageInfo, *, seed: int, keep_values: bool) -> BuiltModel:
    """Build a model to plan a job with. No collectives; ranks of one host build one after another.

    Args:
        provider: Builds the model.
        stage: Which part of it.
        seed: The job's seed.
        keep_values: Whether to keep the values, as the only rank of a job does, or the structure on `meta`.

    Raises:
        UserError: If values would be lost, or a layout could not keep them.
    """
    if provider.late_init:
        module = _build_on_meta(provider, stage)
        return BuiltModel(module, _on_meta(module), frozenset(), None)
    if keep_values:
        module, values = build_with_values(provider, stage, seed=seed)
        tensors = _on_meta(module)
        return BuiltModel(module, tensors, frozenset(tensors.keys() - values.keys()), {})
    with _turn_of_host():
        module, digests = _build_and_digest(provider, stage, seed=seed)
        move_to_meta(module)
    tensors = _on_meta(module)
    return BuiltModel(module, tensors, frozenset(tensors.keys() - digests.keys()), digests)


def build_with_values(
    provider: ModelProvider, stage: StageInfo, *, seed: int
) -> tuple[nn.Module, Mapping[str, Tensor]]:
    """Build a model on the CPU; `random`, NumPy (where it is in use) and torch are seeded with the job's seed.

    Returns:
        The model, and the values that it was built with.
    """
    with own_random("build"):
        random.seed(seed)
        torch.manual_seed(seed)
        if numpy := sys.modules.get("numpy"):
            numpy.random.seed(seed % 2**32)
        module = provider.build(stage)
    module.zero_grad()
    return module, built_values(module, skip_meta=provider.initial_weights is not None)


def report_different_values(model: BuiltModel, ctx: DistributedContext) -> None:
    """Print on rank 0 which parameters ranks built differently. Collective: an all-gather of 8 bytes a tensor.

    Raises:
        UserError: On every rank, if ranks built models of different structure.
    """
    structure = [
        (name, list(tensor.shape), str(tensor.dtype), tensor.requires_grad) for name, tensor in model.tensors.items()
    ]
    ctx.check_agreement("the structure of the model", json.dumps(structure))
    assert model.digests is not None
    mine = torch.tensor(list(model.digests.values()), dtype=torch.int64, device=ctx.device)
    digests = mine.new_empty(ctx.world_size * mine.numel())
    dist.all_gather_into_tensor(digests, mine)
    differs = digests.view(ctx.world_size, -1) != digests.view(ctx.world_size, -1)[:1]
    if ctx.is_main_process and differs.any():
        names = [name for name, odd in zip(model.digests, differs.any(0).tolist(), strict=True) if odd]
        ranks = [str(rank) for rank, odd in enumerate(differs.any(1).tolist()) if odd]
        print(
            f"d9d: rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)} built other values than rank 0 for "
            f"{', '.join(names)}; the values of rank 0 are used. Draw them from torch's default generator, which is "
            "seeded alike on every rank."
        )


def _build_and_digest(provider: ModelProvider, stage: StageInfo, *, seed: int) -> tuple[nn.Module, dict[str, int]]:
    """Build a model of which only the structure and digests are needed: without large draws, where that is possible."""
    draws = SkippedDraws()
    try:
        with draws:
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
    tensors = [*module.named_parameters(), *module.named_buffers()]
    lost = [f"  {name} has values already" for name, tensor in tensors if not tensor.is_meta]
    lost += [f"  {name} is written to outside of reset_parameters" for name, tensor in tensors if writes.lost(tensor)]
    if lost:
        raise UserError(
            "the model is built on `meta`, and values that its constructor sets would be lost:\n"
            + "\n".join(lost)
            + "\nSet late_init = False (of the provider, or of FunctionProvider) to train from the values that the "
            "model is built with, or set them in reset_parameters of the module that owns them."
        )
    return module


@final
class _Writes(TorchDispatchMode):
    """Records for each storage whether its last in-place write came from a `reset_parameters`."""

    def __init__(self) -> None:
        super().__init__()
        self._by_storage: dict[int, tuple[torch.UntypedStorage, bool]] = {}

    def lost(self, tensor: Tensor) -> bool:
        """Return whether the last write to a tensor will not be repeated by a `reset_parameters`."""
        _, is_reset = self._by_storage.get(tensor.untyped_storage()._cdata, (None, True))
        return not is_reset

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func._schema.is_mutable:
            written = [
                value
                for argument, value in zip(func._schema.arguments, args, strict=False)
                if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, Tensor)
            ]
            for tensor in written:
                storage = tensor.untyped_storage()
                # The storage is kept: its address is not given to another one.
                self._by_storage[storage._cdata] = (storage, _is_within_reset())
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


@contextmanager
def _turn_of_host() -> Generator[None]:
    """Let one rank of a job on this host build at a time.

    Jobs differ in the launcher's address. There are few files, since nobody can delete them without a race; two jobs
    that share one only wait for each other.
    """
    job = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    path = Path(tempfile.gettempdir()) / f"d9d-build-{os.getuid()}-{zlib.crc32(job.encode()) % 256}.lock"
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
