"""Trace of a `transformers` model on `meta`: its list of blocks, and the values that cross a cut between two blocks.

Position p is the code between block p - 1 and block p; position 0 is the code before the blocks, and the last position
the code behind them. A tensor that depends on parameters lives at the last position that contributes to it. A tensor
that depends only on the batch, such as a mask or a rotary table, has no position: each stage computes it itself.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from typing import Any, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from d9d_dist import StageInfo, UserError
from d9d_loop.model.block_lists import block_lists, blocks_of
from d9d_loop.model.built_model import meta_copy

Path: TypeAlias = tuple[int | str, ...]
"""Path to a tensor in the arguments `(args, kwargs)` of a block's call."""

_BATCH, _LENGTH = 2, 8


@final
@dataclass(frozen=True, slots=True)
class Argument:
    """Tensor that a block receives, and its position; `value` identifies tensors that several blocks receive."""

    block: int
    path: Path
    position: int
    value: int


@final
@dataclass(slots=True)
class BlockTrace:
    """Uses of the blocks, and of the parameters outside of them, in a forward.

    Attributes:
        blocks: Name of the module list whose modules are the blocks.
        arguments: Tensors with a position that blocks receive, in the order of the calls.
        hidden: For each block, the path of its hidden states, and its output, in which `Hidden` replaces tensors of the
            same shape, and `None` all others.
        uses: Positions of the code that uses a parameter outside of blocks, by the parameter's first name.
        calls: Positions of the calls of a module outside of blocks that has parameters, by name.
        mixed: Descriptions of values that a cut k would separate, by the range (first k, k after the last one).
        dtype: Dtype of the hidden states of the last block.
    """

    model: nn.Module
    blocks: str
    arguments: list[Argument] = field(default_factory=list)
    hidden: list[tuple[Path, Any]] = field(default_factory=list)
    uses: dict[str, set[int]] = field(default_factory=dict)
    calls: dict[str, set[int]] = field(default_factory=dict)
    mixed: dict[tuple[int, int], str] = field(default_factory=dict)
    dtype: torch.dtype | None = None

    @property
    def num_blocks(self) -> int:
        """Number of blocks."""
        return len(self.hidden)

    def carried(self, cut: int) -> list[list[Argument]]:
        """Return what crosses the cut before block `cut`: the arguments of later blocks, grouped by value."""
        groups: dict[int, list[Argument]] = {}
        for each in self.arguments:
            if each.position <= cut <= each.block:
                groups.setdefault(each.value, []).append(each)
        return list(groups.values())

    def virtual_layers(self, wanted: int, num_stages: int) -> int:
        """Return the largest number of virtual layers, at most `wanted`, with which the first stage can end."""
        for found in range(wanted, 0, -1):
            cut = StageInfo(0, num_stages).layers(self.num_blocks, virtual_before=found).stop
            if cut and not any(first <= cut < end for first, end in self.mixed):
                return found
        return 0

    def check_cut(self, cut: int) -> None:
        """Raise `UserError` if a value that cannot be sent crosses the cut before block `cut`."""
        for (first, end), what in self.mixed.items():
            if first <= cut < end:
                raise UserError(
                    f"{type(self.model).__name__} cannot be split before {self.blocks}.{cut}: {what}; expected only "
                    "tensors that the blocks receive. Set mesh.pipeline_parallel to 1, and shard with "
                    "mesh.data_parallel_shard."
                )


class Hidden:
    """Placeholder of the hidden states in the output of a block."""


def trace_blocks(model: Any) -> BlockTrace:
    """Run a copy of a causal model on `meta`, and return how its blocks are connected.

    Modules inside of blocks that cannot run on `meta`, such as experts that loop over their tokens, pass their first
    input on.

    Raises:
        UserError: If the model cannot run on `meta`, or has no list of blocks that are called once each, in order.
    """
    trace = BlockTrace(*find_blocks(model, axis="mesh.pipeline_parallel"))
    _record(trace)
    if getattr(model.config, "deepstack_layer_map", None):  # the trace has no images
        trace.mixed.setdefault((0, trace.num_blocks), "features of images are added before blocks")
    for module in trace.model.modules():
        vars(module).pop("forward", None)
    return trace


def find_blocks(model: Any, *, axis: str) -> tuple[Any, str]:
    """Return a causal model's copy on `meta`, and the name of its largest list of blocks called once each, in order."""
    model = on_meta(model)
    for name, module in model.named_modules():
        if any(part.isdigit() for part in name.split(".")):
            module.forward = partial(_forward_or_pass, module.forward)
    lists = {name: list(layers) for name, layers in block_lists(model).items() if isinstance(layers, nn.ModuleList)}
    calls: list[nn.Module] = []
    handles = [block.register_forward_pre_hook(lambda module, _: calls.append(module)) for block in blocks_of(model)]
    _run(model, axis)
    for handle in handles:
        handle.remove()
    found = next((name for name, blocks in lists.items() if [each for each in calls if each in blocks] == blocks), None)
    if found is None:
        raise UserError(
            f"{type(model).__name__} has no list of blocks that are called once each, in order; expected a decoder "
            f"such as Llama's. Set {axis} to 1. (Lists: {', '.join(lists) or 'none'}.)"
        )
    return model, found


def on_meta(model: Any) -> Any:
    """Return a copy of a model on `meta`, without parameters to train and without a cache."""
    model = meta_copy(model).requires_grad_(requires_grad=False)
    without_cache(model)
    return model


def without_cache(model: nn.Module) -> None:
    """Let a model keep no keys and values. With a cache, `transformers` would ignore the documents of packed rows."""
    for module in model.modules():
        if hasattr(config := getattr(module, "config", None), "use_cache"):
            config.use_cache = False


def _forward_or_pass(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    try:
        return forward(*args, **kwargs)
    except Exception:
        return torch.empty_like(next(tensor for _, tensor in tensors_in((args, kwargs))))


def tensors_in(tree: Any, path: Path = ()) -> Iterator[tuple[Path, Tensor]]:
    """Yield the tensors in nested tuples, lists and dicts, with their paths."""
    if isinstance(tree, Tensor):
        yield path, tree
    elif isinstance(tree, dict):
        for key, value in tree.items():
            yield from tensors_in(value, (*path, key))
    elif isinstance(tree, tuple | list):
        for key, value in enumerate(tree):
            yield from tensors_in(value, (*path, key))


def _run(model: Any, axis: str = "mesh.pipeline_parallel") -> Any:
    ids = torch.zeros(_BATCH, _LENGTH, dtype=torch.int64, device="meta")
    takes_mask = "attention_mask" in signature(model.forward).parameters
    inputs = {"input_ids": ids, "attention_mask": ids} if takes_mask else {"input_ids": ids}
    try:
        with torch.enable_grad(), torch.device("meta"), MetaAnswers():
            return model(**inputs)
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"{axis} needs a forward of {type(model).__name__} on the device meta, which fails with "
            f"{type(error).__name__}: {error}; expected a causal decoder. Set {axis} to 1."
        ) from error


def _record(trace: BlockTrace) -> None:
    model = trace.model
    mode = _Positions(model, trace)
    blocks: Any = model.get_submodule(trace.blocks)
    handles = []
    for index, block in enumerate(blocks):
        handles.append(block.register_forward_pre_hook(partial(mode.enter, index), with_kwargs=True))
        handles.append(block.register_forward_hook(mode.leave, with_kwargs=True))
    for name, module in model.named_modules():
        if module._parameters and not f"{name}.".startswith(f"{trace.blocks}."):
            handles.append(module.register_forward_pre_hook(partial(mode.call, name)))
    with mode:
        outputs = _run(model)
    for handle in handles:
        handle.remove()
    outputs = dict(outputs) if isinstance(outputs, Mapping) else outputs
    for path, tensor in tensors_in(outputs):
        mode.mix({mode.position_of(tensor)}, trace.num_blocks, f"{'.'.join(map(str, path))} of its output")


@final
class MetaAnswers(TorchDispatchMode):
    """Mode that answers reads of values on `meta`, as if a mask is all ones and a row is one document."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return torch.ones((), dtype=args[0].dtype).item()
        return func(*args, **(kwargs or {}))


@final
class _Positions(TorchDispatchMode):
    """Mode that records the positions of tensors by storage, so that views have the position of their base."""

    def __init__(self, model: nn.Module, trace: BlockTrace) -> None:
        super().__init__()
        self._trace, self._position, self._block = trace, 0, None
        self._block: int | None = None
        self._positions: dict[int, int] = {}
        self._kept: list[Any] = []
        self._names = {each.untyped_storage()._cdata: name for name, each in model.named_parameters()}

    def position_of(self, tensor: Tensor) -> int | None:
        return self._positions.get(tensor.untyped_storage()._cdata)

    def enter(self, index: int, module: nn.Module, args: Any, kwargs: Any) -> None:
        trace, given = self._trace, (args, kwargs)
        self._given: set[int] = set()
        hidden: tuple[Path, Tensor] | None = None
        for path, tensor in tensors_in(given):
            position = self.position_of(tensor)
            self._given.add(tensor.untyped_storage()._cdata)
            if position is not None:
                self._kept.append(tensor)
                trace.arguments.append(Argument(index, path, position, id(tensor)))
                hidden = hidden or ((path, tensor) if position == index else None)
        if hidden is None or not torch.is_grad_enabled():
            why = "runs without gradients" if hidden else "receives nothing from the block before it"
            raise UserError(
                f"{trace.blocks}.{index} of {type(trace.model).__name__} {why}; expected a chain of blocks, as torch "
                "records it. Set mesh.pipeline_parallel to 1."
            )
        trace.hidden.append((hidden[0], hidden[1].shape))
        self._block = index
        for each in (*args, *kwargs.values()):
            if hasattr(each, "__dict__") and not isinstance(each, Tensor | nn.Module):
                held = {self.position_of(tensor) for _, tensor in tensors_in(vars(each))}
                self.mix(held, index + 1, f"the block receives values in a {type(each).__name__}")

    def call(self, name: str, module: nn.Module, args: Any) -> None:
        self._trace.calls.setdefault(name, set()).add(self._position)

    def leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        assert self._block is not None
        path, shape = self._trace.hidden[self._block]
        self._trace.hidden[self._block] = (path, _without_tensors(output, shape))
        self._position, self._block = self._block + 1, None
        self._trace.dtype = next(tensor.dtype for _, tensor in tensors_in(output))

    def mix(self, positions: set[int | None], here: int | None, what: str) -> None:
        """Record that code, described by `what`, combines values of these positions, and of `here` if not None."""
        found = {each for each in (*positions, here) if each is not None}
        if positions != {None} and found and min(found) < max(found):
            self._trace.mixed.setdefault((min(found), max(found)), what)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = [tensor for _, tensor in tensors_in((args, kwargs or {}))]
        storages = [each.untyped_storage()._cdata for each in given]
        names = [self._names[each] for each in storages if each in self._names]
        positions = {each for each in map(self.position_of, given) if each is not None}
        if not names and not positions:
            return result
        if self._block is not None:
            position = self._block + 1
            outer = {self._positions.get(each) for each in storages if each not in self._given}
            self.mix(outer, position, f"the block {self._block} uses values that it does not receive ({func})")
        else:
            for name in names:
                self._trace.uses.setdefault(name, set()).add(self._position)
            what = f"code outside of the blocks uses values of several of them ({func})"
            self.mix({*positions}, self._position if names else None, what)
            position = max({*positions, self._position} if names else positions)
        written = [each for argument, each in zip(func._schema.arguments, args, strict=False) if argument.is_write]
        new = [each for _, each in tensors_in(result) if each.untyped_storage()._cdata not in storages]
        for tensor in (*new, *(each for _, each in tensors_in(written))):
            storage = tensor.untyped_storage()
            self._kept.append(storage)
            self._positions[storage._cdata] = position
        return result


def _without_tensors(output: Any, shape: torch.Size) -> Any:
    match output:
        case Tensor():
            return Hidden if output.shape == shape else None
        case tuple() if hasattr(output, "_fields"):
            return type(output)(*(_without_tensors(each, shape) for each in output))
        case tuple() | list():
            return type(output)(_without_tensors(each, shape) for each in output)
    return output
