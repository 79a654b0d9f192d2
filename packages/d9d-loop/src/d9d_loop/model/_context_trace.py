"""Trace of a `transformers` model on `meta`: what context-parallel ranks split, and proof that the rest allows it.

The code before the first block runs on whole rows. At the first block the hidden states are split, and from there on a
tensor that depends on them is *local*: it has this rank's positions. Only calls of the attention interface may combine
local positions. A module of a block with code that does, such as a recurrent mixer, computes whole rows on each rank.
The length of the trace is a prime that divides no size of the model, so that the sizes of a tensor show which of its
dims hold positions.
"""

import re
import sys
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from typing import Any, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from d9d_dist import UserError
from d9d_loop.model._block_trace import MetaAnswers, Path, find_blocks, on_meta, tensors_in

_PRIMES = (29, 31, 23, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83, 89, 97)
_BATCH = 5

_MATMULS = {"mm": 1, "bmm": 1, "mv": 1, "dot": 1, "addmm": 2, "addmv": 2, "baddbmm": 2}
"""Index of the second factor, whose first dim but the batch is summed over."""
_ACTS_ON_POSITIONS = (
    "_to_copy", "_unsafe_view", "copy_", "fill_", "zero_", "masked_fill_", "lift_fresh", "lift_fresh_copy", "embedding",
    "repeat", "stack", "isin", "bucketize", "native_dropout", "bernoulli", "bernoulli_", "uniform_", "normal_",
    "exponential_", "rand_like", "randn_like", "empty_like", "full_like", "zeros_like", "ones_like", "new_empty",
    "new_zeros", "new_ones", "new_full", "new_empty_strided", "_assert_async",
)  # fmt: skip
"""Operators without a dim argument whose result at a position depends on this position; see `_combines`."""

_DATA_DEPENDENT = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}

_CONSTANTS = frozenset(["empty", "zeros", "ones", "full", "scalar_tensor", "rand", "randn", "empty_strided"])
"""Operators without tensors as inputs, whose values are equal at all positions, or random."""


Dims: TypeAlias = dict[Path, int | None]
"""Dim of positions to split or to gather of each tensor in the arguments or the output of a module, by its path."""


@final
@dataclass(slots=True)
class WholeRows:
    """One or more modules that compute whole rows: `inputs` belong to the first and `outputs` to the last one.

    Attributes:
        reason: Description of what the code does with positions.
    """

    reason: str
    inputs: Dims = field(default_factory=dict)
    outputs: Dims = field(default_factory=dict)


@final
@dataclass(slots=True)
class ContextTrace:
    """Parts of a model that context-parallel ranks split, and modules that compute whole rows.

    Attributes:
        blocks: Name of the module list of blocks.
        whole: Modules of blocks that compute whole rows. A module around the blocks computes them after the blocks.
        splits: For each block, paths of the arguments with whole rows, and the dim to split.
        attention: Names of modules that call the attention interface with local queries.
    """

    blocks: str
    whole: dict[str, WholeRows] = field(default_factory=dict)
    splits: list[Dims] = field(default_factory=list)
    attention: set[str] = field(default_factory=set)


def trace_context(model: Any) -> ContextTrace:
    """Run a copy of a model on `meta` as one of two context-parallel ranks.

    Raises:
        UserError: If code outside of modules of blocks combines positions, or cannot run on `meta`.
    """
    _use_interface()
    blocks, reasons = find_blocks(model, axis="mesh.context_parallel_shard")[1], dict[str, str]()
    while True:
        trace = ContextTrace(blocks, {name: WholeRows(reason) for name, reason in reasons.items()})
        try:
            _trace(on_meta(model), trace)
        except _PositionsError as error:
            reasons = _with_whole(model, trace, error)
        else:
            return trace


def _with_whole(model: Any, trace: ContextTrace, error: "_PositionsError") -> dict[str, str]:
    """Return the modules to compute on whole rows after an error, with reasons. Raise the error if there are none."""
    name, reason = error.module, error.what
    for each, rows in trace.whole.items():
        if f"{name}.".startswith(f"{each}."):  # not enough
            name, reason = each.rpartition(".")[0], rows.reason
    if not name or name in trace.whole or re.fullmatch(rf"{re.escape(trace.blocks)}(\.\d+)?", name):
        raise error
    kept = {each: rows.reason for each, rows in trace.whole.items()}
    if not name.startswith(f"{trace.blocks}."):
        return kept | {name: reason}
    inner = name.removeprefix(f"{trace.blocks}.").partition(".")[2]
    same = [f"{trace.blocks}.{index}.{inner}" for index in range(len(model.get_submodule(trace.blocks)))]
    modules, kind = dict(model.named_modules()), type(model.get_submodule(name))
    names = [each for each in same if type(modules.get(each)) is kind]
    kept = {each: why for each, why in kept.items() if not each.startswith(tuple(f"{other}." for other in names))}
    return kept | dict.fromkeys(names, reason)


def _trace(model: Any, trace: ContextTrace) -> None:
    for module in model.modules():
        if hasattr(config := getattr(module, "config", None), "_experts_implementation"):
            config._experts_implementation = "eager"  # the others sort tokens by their experts
    sizes = {size for each in (*model.parameters(), *model.buffers()) for size in each.shape}
    length = next((each for each in _PRIMES if all(size % each for size in sizes)), None)
    assert length is not None, "each prime divides a size of the model"
    _Positions(model, trace, length).run()


@final
class _PositionsError(UserError):
    """Code of a module that cannot act on a part of the positions."""

    def __init__(self, kind: str, module: str, what: str) -> None:
        super().__init__(
            f"{kind} cannot be split over context-parallel ranks: in {module or 'its forward'}, {what}; expected "
            "attention by the interface of transformers, and code that acts on single positions elsewhere. Set "
            "mesh.context_parallel_shard to 1, and shard with mesh.data_parallel_shard."
        )
        self.module, self.what = module, what


@final
class _DataDependentError(Exception):
    """Raised at an operator whose result has a size that depends on values, such as the tokens of an expert."""


@final
class _Positions(TorchDispatchMode):
    """Mode that records which tensors are local, by storage, and raises `UserError` at code that mixes positions."""

    def __init__(self, model: Any, trace: ContextTrace, length: int) -> None:
        super().__init__()
        self._model, self._trace, self._length = model, trace, length
        self._local: dict[int, Any] = {}
        self._combined: dict[int, UserError] = {}
        self._calls: list[str] = []
        self._is_split = False
        around = [name for name in trace.whole if f"{trace.blocks}.".startswith(f"{name}.")]
        self._behind = trace.whole[around[0]] if around else None

    def run(self) -> None:
        """Run the model on whole rows of twice the length."""
        for name, module in self._model.named_modules():
            vars(module)["context_attention"] = partial(self._attend, name)
            module.forward = partial(self._call, name, module.forward)
        for index, block in enumerate(blocks := self._model.get_submodule(self._trace.blocks)):
            self._trace.splits.append({})
            block.register_forward_pre_hook(partial(self._enter, index), with_kwargs=True)
        if (behind := self._behind) is not None:
            blocks[-1].register_forward_hook(lambda module, args, output: self._gather(output, behind.inputs))
        ids = torch.zeros(_BATCH, 2 * self._length, dtype=torch.int64, device="meta")
        takes_mask = "attention_mask" in signature(self._model.forward.args[1]).parameters
        inputs = {"input_ids": ids, "attention_mask": ids} if takes_mask else {"input_ids": ids}
        with self, torch.no_grad(), torch.device("meta"), MetaAnswers():
            outputs = self._model(**inputs)
        self._check(dict(outputs) if isinstance(outputs, Mapping) else outputs)

    def _call(self, name: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._calls.append(name)
        try:
            if (rows := self._trace.whole.get(name)) is None:
                return forward(*args, **kwargs)
            if rows is not self._behind:
                args, kwargs = self._gather((args, kwargs), rows.inputs)
            return self._split(forward(*args, **kwargs), rows.outputs)
        except _DataDependentError as error:
            # Experts select their tokens; each token is computed alone.
            if any(True for each in self._model.get_submodule(name).children() for _ in each.parameters()):
                raise self._error("the size of a tensor depends on values of positions") from error
            first = next(tensor for _, tensor in tensors_in((args, kwargs)))
            return self._as_local(first.shape, first) if self._is_local(first) else torch.empty_like(first)
        except UserError:
            raise
        except Exception as error:
            # Whole and local rows do not fit together, for example.
            raise self._error(f"a part of each row fails with {type(error).__name__}: {error}") from error
        finally:
            self._calls.pop()

    def _enter(self, index: int, module: nn.Module, args: Any, kwargs: Any) -> Any:
        call, splits = (args, kwargs), self._trace.splits[index]
        self._check(call)
        for path, tensor in list(tensors_in(call)):
            splits[path] = dim = None if self._is_local(tensor) else self._whole_dim(tensor)
            if dim is None:
                continue
            shape = [*tensor.shape]
            shape[dim] = self._length
            call = with_value(call, path, self._as_local(torch.Size(shape), tensor))
        if not self._is_split and {*splits.values()} == {None}:  # CPM-Ant puts a prompt before each row
            raise self._error("the first block receives no tensor with the positions of the tokens")
        self._is_split = True
        return call

    def _gather(self, tree: Any, dims: Dims) -> Any:
        """Return the arguments or the output of a module with whole rows, and record the dims of positions."""
        self._check(tree)
        for path, tensor in list(tensors_in(tree)):
            dims[path] = None
            if not self._is_local(tensor) or not self._has_positions(tensor):
                continue
            others = {*filter(self._is_length, tensor.shape)} - {self._length, 2 * self._length}
            if tensor.shape.count(self._length) != 1 or others:
                raise self._error(f"a tensor [{', '.join(map(str, tensor.shape))}] has unknown dims")
            dims[path] = tensor.shape.index(self._length)
            shape = [2 * size if size == self._length else size for size in tensor.shape]
            tree = with_value(tree, path, torch.empty(shape, dtype=tensor.dtype))
        return tree

    def _split(self, tree: Any, dims: Dims) -> Any:
        """Return the output of a module for this rank's positions, and record the dims of positions."""
        for path, tensor in list(tensors_in(tree)):
            found = [dim for dim, size in enumerate(tensor.shape) if size == 2 * self._length]
            is_square = found == [tensor.dim() - 2, tensor.dim() - 1]  # queries and keys
            if len(found) == 1 or is_square:
                dims[path] = found[0]
                shape = [size // 2 if dim == found[0] else size for dim, size in enumerate(tensor.shape)]
                tree = with_value(tree, path, self._as_local(torch.Size(shape), tensor))
            else:
                self._local[tensor.untyped_storage()._cdata] = tensor
                self._combined[tensor.untyped_storage()._cdata] = self._error("an output has values of whole rows")
        return tree

    def _whole_dim(self, tensor: Tensor) -> int | None:
        """Return the dim of whole rows. A mask has two of them, the last one for the keys: return the first."""
        dims = [dim for dim, size in enumerate(tensor.shape) if size == 2 * self._length]
        if tensor.dim() == 4 and dims and dims[-1] == 3:  # a mask [B, H, queries, keys]
            dims.pop()
        if len(dims) > 1 or any(size and size % self._length == 0 and size > 2 * self._length for size in tensor.shape):
            raise self._error(f"a block receives a tensor [{', '.join(map(str, tensor.shape))}], of unknown dims")
        return dims[0] if dims else None

    def _as_local(self, shape: torch.Size, like: Any) -> Tensor:
        dtype = next(tensor.dtype for _, tensor in tensors_in(like))
        tensor = torch.empty(shape, dtype=dtype, device="meta")
        self._local[tensor.untyped_storage()._cdata] = tensor
        return tensor

    def _attend(  # noqa: PLR0917 - as transformers calls it
        self,
        name: str,
        attend: Any,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any = None,
        **options: Any,
    ) -> Any:
        if not self._is_local(query):
            return attend(module, query, key, value, attention_mask, **options)
        length = self._length
        self._check((query, key, value, attention_mask))
        if query.shape[2] != length or key.shape[2] != length or not self._is_local(key):
            raise self._error("attention has keys of other positions than its queries")
        if attention_mask is not None and (
            not isinstance(attention_mask, Tensor)
            or attention_mask.shape[-1] != 2 * length
            or attention_mask.shape[-2] not in (1, length)
        ):
            raise self._error("attention has a mask other than [B, H, queries, keys]")
        named = [each for each in signature(attend).parameters if each in options]
        if found := [
            each for each in named if isinstance(options[each], Tensor) and self._has_positions(options[each])
        ]:
            raise self._error(f"attention has the argument {found[0]}, with values of positions")
        self._trace.attention.add(name)
        return self._as_local(torch.Size((*query.transpose(1, 2).shape[:3], value.shape[-1])), value), None

    def _is_local(self, tensor: Any) -> bool:
        return isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata in self._local

    def _has_positions(self, tensor: Tensor) -> bool:
        return any(map(self._is_length, tensor.shape))

    def _num_positions(self, tensor: Tensor) -> int:
        """Return the number of dims of positions, also if a view has merged dims."""
        size, count = tensor.numel(), 0
        while size and size % self._length == 0:
            size, count = size // self._length, count + 1
        return count

    def _is_length(self, size: int) -> bool:
        return size > 0 and size % self._length == 0

    def _error(self, what: str) -> UserError:
        return _PositionsError(type(self._model).__name__, self._calls[-1] if self._calls else "", what)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = [tensor for _, tensor in tensors_in((args, kwargs))]
        local = [tensor for tensor in given if self._is_local(tensor)]
        name = func._schema.name.partition("::")[2]
        is_inner = local or any(self._trace.whole.get(each, self._behind) is not self._behind for each in self._calls)
        is_mask = name != "index" or any(each.dtype in (torch.bool, torch.uint8) for _, each in tensors_in(args[1]))
        if is_inner and _DATA_DEPENDENT & {*func.tags} and is_mask:
            raise _DataDependentError
        result = func(*args, **kwargs)
        results = [tensor for _, tensor in tensors_in(result)]
        written = [*results, *(given[:1] if name.endswith("_") else ())]
        combined = [each for each in map(self._combination, given) if each is not None]
        if not local:
            # Without inputs, the result of the local length would have positions that start at 0 on each rank.
            if self._is_split and not given and name not in _CONSTANTS and any(map(self._has_local_length, results)):
                combined = [self._error(f"positions are computed from the length of a tensor ({name})")]
        elif combined and any(self._combination(each) is None for each in local):
            raise combined[0]
        elif any(map(self._has_positions, local)):
            schema = func._schema.arguments
            arguments = {each.name: each.default_value for each in schema if each.has_default_value()}
            arguments |= dict(zip((each.name for each in schema), args, strict=False)) | kwargs
            kept = min((self._num_positions(each) for each in results if each.numel()), default=len(schema))
            if kept < max(map(self._num_positions, local)) or self._combines(func, name, arguments):
                combined = [self._error(f"positions are combined ({name})")]
        for each in written if local or combined else ():
            self._local[each.untyped_storage()._cdata] = each
            if combined:
                self._combined[each.untyped_storage()._cdata] = combined[0]
        return result

    def _combination(self, tensor: Tensor) -> UserError | None:
        return self._combined.get(tensor.untyped_storage()._cdata)

    def _has_local_length(self, tensor: Tensor) -> bool:
        return any(self._is_length(size) and size % (2 * self._length) for size in tensor.shape)

    def _check(self, tree: Any) -> None:
        """Raise the error of the first tensor whose values combine positions."""
        for _, tensor in tensors_in(tree):
            if (error := self._combination(tensor)) is not None:
                raise error

    def _combines(self, func: Any, name: str, arguments: dict[str, Any]) -> bool:
        """Return True if an operator may combine several positions of a tensor."""
        if torch.Tag.pointwise in func.tags or func.is_view:
            return False
        values = [arguments[each.name] for each in func._schema.arguments if each.name in arguments]
        if name in _MATMULS:
            factor: Tensor = values[_MATMULS[name]]
            sizes = factor.shape[-2:-1] if factor.dim() > 1 else factor.shape
        elif "normalized_shape" in arguments:
            sizes = arguments["normalized_shape"]
        elif name == "convolution":
            pairs = zip(values[0].shape[2:], values[1].shape[2:], strict=True)
            sizes = [size for size, kernel in pairs if kernel > 1]
        elif name == "constant_pad_nd":
            sizes = [values[0].shape[-1 - place // 2] for place, added in enumerate(values[1]) if added]
        elif name in ("index", "index_put_"):
            pairs = zip(values[0].shape, values[1], strict=False)
            sizes = [size for size, index in pairs if index is not None and self._is_local(values[0])]
        elif name in _ACTS_ON_POSITIONS:
            sizes = []
        else:
            return self._combines_dims(arguments, values[0])
        return any(map(self._is_length, sizes))

    def _combines_dims(self, arguments: dict[str, Any], given: Any) -> bool:
        """Return True if an operator has no argument for dims, or the dims of positions are among them."""
        dims = next((arguments[key] for key in ("dim", "dims", "axis") if key in arguments), None)
        dims = dims if isinstance(dims, list | tuple) else [dims]
        shapes = [tensor.shape for _, tensor in tensors_in(given) if tensor.dim()]
        return not dims or any(dim is None or self._is_length(shape[dim]) for shape in shapes for dim in dims)


def with_value(tree: Any, path: Path, value: Any, *, copies: bool = True) -> Any:
    """Return nested tuples, lists and dicts with another value at a path; dicts themselves change without `copies`."""
    if not path:
        return value
    key, rest = path[0], tuple(path[1:])
    if isinstance(tree, dict):
        tree = copy(tree) if copies else tree  # of its class: the outputs of transformers are dicts with attributes
        tree[key] = with_value(tree.get(key), rest, value, copies=copies)
        return tree
    values = [with_value(each, rest, value, copies=copies) if place == key else each for place, each in enumerate(tree)]
    return type(tree)(*values) if hasattr(tree, "_fields") else type(tree)(values)


def _use_interface() -> None:
    """Let the attention interface of `transformers` ask modules for a `context_attention`, which replaces a call."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register("sdpa", partial(_attend, sdpa_attention_forward))
    AttentionInterface.register("eager", partial(_attend, None))


def _attend(attend: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if attend is None:
        files = (vars(sys.modules[kind.__module__]) for kind in type(module).__mro__)
        attend = next(file["eager_attention_forward"] for file in files if "eager_attention_forward" in file)
    context = vars(module).get("context_attention")
    return attend(module, *args, **kwargs) if context is None else context(attend, module, *args, **kwargs)
