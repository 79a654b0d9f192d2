"""Checks after the first two steps: parameters are not replaced, and buffers and attributes do not depend on the rank.

The optimizer holds the parameters of the built model, so a step must not create or replace parameters. Buffers and
Python attributes, such as a moving average, must not depend on the rank's part of the batch. An attribute may be kept
for inspection only, such as the scores of the last batch. So an attribute that differs between ranks raises an error
only if the next forward reads it before setting it. `list.append` also reads the attribute, so for lists, tuples and
dicts a message is printed instead.
"""

import zlib
from collections.abc import Iterator
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from d9d_dist import DistributedContext, UserError, canonical_name, gather_json
from d9d_dist.errors import shorten
from d9d_dist.values.model_values import digest_values
from d9d_dist.values.parameter_writes import refuse_sparse_gradient
from d9d_loop.model.model_check import check_same_parameters
from d9d_loop.resilience.replica_check import check_buffers

_STATE = int | float | complex | torch.Generator
_OWN = frozenset(vars(nn.Module()))
"""Attributes of every module: registries, hooks and the training flag."""


@final
class FirstSteps:
    """Checks of a model after its first and second step.

    Attributes are compared if they hold numbers, generators or tensors, or lists, tuples and dicts of them. A backward
    that gives a plain parameter a sparse gradient raises `UserError`.

    Args:
        model: Model of the job, before the first step.
        ctx: Distributed context.
    """

    def __init__(self, model: nn.Module, ctx: DistributedContext) -> None:
        self._model, self._ctx, self._num_steps = model, ctx, 0
        self._parameters = dict(model.named_parameters())
        for name, parameter in self._parameters.items():
            if parameter.requires_grad and not isinstance(parameter, DTensor):
                refuse_sparse_gradient(name, parameter)
        self._digests = [_digests(model)]
        self._watched: list[_Reads] = []

    def check(self, step: int) -> None:
        """Check the model after a step; from the third step on, do nothing. `step` is only for messages.

        Collective over the ranks that split a batch, with several ranks: an all-gather of the digests of the changed
        attributes, two all-gathers of names, and the collectives of `check_buffers`.

        Raises:
            ReplicaError: On all ranks, if persistent buffers differ after the first step.
            UserError: If the first step created, replaced or deleted parameters. On all ranks, if the second step read
                an attribute that differs between ranks before it set the attribute.
        """
        self._num_steps += 1
        if self._num_steps <= 2:
            self._digests.append(_digests(self._model))
        if self._num_steps == 1:
            check_same_parameters(self._model, self._parameters)
            self._parameters.clear()
            check_buffers(self._model, step=step, ctx=self._ctx)
            self._watch_differences()
        elif self._num_steps == 2:
            self._refuse_reads()
            self._name_numbers()

    def _name_numbers(self) -> None:
        """Print the numbers and generators of modules that both steps changed, and that checkpoints do not contain."""
        numbers = [name for name, each in _attributes(self._model) if isinstance(each, _STATE)]
        values = {name: [digests.get(name) for digests in self._digests] for name in numbers}
        changed = gather_json([name for name, (first, second, third) in values.items() if first != second != third])
        if (names := sorted({name for each in changed for name in each or ()})) and self._ctx.is_main_process:
            print(
                f"d9d: forward changes {shorten(names)}, which checkpoints do not contain. If forward also reads it, a "
                "resumed run differs: register numbers as buffers, and draw from the default generators."
            )

    def _watch_differences(self) -> None:
        before, now = self._digests
        changed = {name: digest for name, digest in now.items() if before.get(name) != digest}
        every = gather_json(changed, self._ctx.group_for("batch", "dp", "cp"))
        differs = {name for peer in every for name, digest in peer.items() if changed.get(name) != digest}
        for module_name, module in self._model.named_modules():
            keys = {key for key, value in vars(module).items() if not isinstance(value, torch.Generator)}
            if found := {key for key in keys if _full_name(module_name, key) in differs}:
                self._watched.append(_Reads(module, module_name, found))

    def _refuse_reads(self) -> None:
        read = {name: is_container for watch in self._watched for name, is_container in watch.stop().items()}
        self._watched.clear()
        found = {name: is_container for each in gather_json(read) for name, is_container in each.items()}
        lists = sorted(name for name, is_container in found.items() if is_container)
        if lists and self._ctx.is_main_process:
            print(
                f"d9d: forward updates {', '.join(lists)} from each rank's own part of the batch. If forward also "
                "reads their contents, the results depend on the number of ranks."
            )
        if values := sorted(found.keys() - set(lists)):
            raise UserError(
                f"{', '.join(values)}: the values differ between ranks after the first step, because forward computes "
                "them from each rank's own part of the batch, and the next forward reads them; expected equal values. "
                'Sum their inputs over ctx.group_for("batch", "dp", "cp"), or set the values before they are read.'
            )


@final
class _Reads:
    """Recorder of the attributes that a module reads before it sets them. Until `stop`, it replaces the class."""

    def __init__(self, module: nn.Module, name: str, keys: set[str]) -> None:
        self._module, self._name, kind = module, name, type(module)
        unset, read = set(keys), list[str]()
        self._kind: Any = kind
        self._read = read

        def get(self: nn.Module, key: str) -> Any:
            if key in unset:
                unset.discard(key)
                read.append(key)
            return kind.__getattribute__(self, key)

        def put(self: nn.Module, key: str, value: Any) -> None:
            unset.discard(key)
            kind.__setattr__(self, key, value)

        module.__class__ = type(kind.__name__, (self._kind,), {"__getattribute__": get, "__setattr__": put})

    def stop(self) -> dict[str, bool]:
        """Stop recording; return the names of attributes read before they were set, and True if not a plain value."""
        self._module.__class__ = self._kind
        return {_full_name(self._name, key): not _is_plain(vars(self._module).get(key)) for key in self._read}


def _full_name(module_name: str, key: str) -> str:
    return canonical_name(f"{module_name}.{key}".removeprefix("."))


def _attributes(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for module_name, module in model.named_modules():
        yield from ((_full_name(module_name, key), value) for key, value in vars(module).items() if key not in _OWN)


def _digests(model: nn.Module) -> dict[str, int]:
    """Return digests of the attributes of modules that hold numbers or tensors."""
    return {name: digest for name, value in _attributes(model) if (digest := _digest(value)) is not None}


def _digest(value: Any) -> int | None:
    leaves = [leaf for leaf in pytree.tree_leaves(value) if _is_plain(leaf)]
    if not leaves:
        return None
    states = [leaf.get_state() if isinstance(leaf, torch.Generator) else leaf for leaf in leaves]
    kept = [digest_values({"": each.detach()}) if isinstance(each, Tensor) else each for each in states]
    return zlib.crc32(repr(kept).encode())


def _is_plain(leaf: Any) -> bool:
    if isinstance(leaf, Tensor):
        return type(leaf) in {Tensor, nn.Parameter} and leaf.layout == torch.strided and not leaf.is_meta
    return isinstance(leaf, _STATE)
