"""Layout-independent `reset_parameters`: random numbers depend on names and global indices.

A counter-based generator draws the numbers of a parameter, so a rank draws only its own shard. Other operators may run
on shards only if they are elementwise; `ELEMENTWISE` lists the supported operators. Any other operator on a DTensor
raises `NeedsFullTensor`, and the caller runs `reset_parameters` again on full tensors.
"""

import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.nn import init
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from d9d_dist.shards import indexed_blocks, local_tensor
from d9d_dist.values.counter_random import normal_at, uniform_at
from d9d_dist.values.parameter_writes import written_tensors
from d9d_dist.values.seeds import stream_key

_aten = torch.ops.aten

ELEMENTWISE = frozenset(
    {
        _aten.fill_.Scalar,
        _aten.zero_.default,
        _aten.mul_.Tensor,
        _aten.mul_.Scalar,
        _aten.div_.Tensor,
        _aten.div_.Scalar,
        _aten.add_.Tensor,
        _aten.add_.Scalar,
        _aten.sub_.Tensor,
        _aten.sub_.Scalar,
        _aten.clamp_.default,
        _aten.clamp_min_.default,
        _aten.clamp_max_.default,
        _aten.neg_.default,
        _aten.abs_.default,
        _aten.sqrt_.default,
        _aten.exp_.default,
        _aten.log_.default,
    }
)
"""In-place operators whose result for an element is bitwise equal at any position in memory.

This excludes `erfinv_`, `sigmoid_` and `pow_`: their vectorized CPU kernels use another formula for the last elements
of a tensor.
"""


@dataclass(frozen=True, slots=True, eq=False)
class Named:
    """Parameter or buffer of the model under its canonical name, without the names of wrapper modules."""

    name: str
    tensor: torch.Tensor

    @property
    def is_distributed(self) -> bool:
        return isinstance(self.tensor, DTensor)

    @property
    def local(self) -> torch.Tensor:
        """This rank's shard of a DTensor, or the plain tensor itself."""
        return local_tensor(self.tensor)


class NeedsFullTensor(BaseException):
    """Signal that `reset_parameters` cannot run on shards. Not an `Exception`, so that user code does not catch it.

    Attributes:
        tensors: DTensors that were passed to an operator whose result depends on the layout.
    """

    def __init__(self, tensors: Collection[Named]) -> None:
        super().__init__()
        self.tensors = tensors


def storage_key(tensor: torch.Tensor) -> int:
    """Return a key of a tensor's storage; for a DTensor, of the storage of this rank's shard."""
    return local_tensor(tensor).untyped_storage()._cdata


class FillByIndex(TorchDispatchMode):
    """Dispatch mode that replaces random in-place fills by index-based numbers and records writes.

    Attributes:
        written: Parameters and buffers that any operator wrote.

    Args:
        seed: Seed of the initial values.
        scope: Name of the module. It seeds draws into temporary tensors before the first draw into a parameter.
        known: The model's tensors by `storage_key`. If a full tensor replaces a DTensor, the full tensor's key is used.
        before_write: Called before the first write to each tensor in `known`.
    """

    def __init__(
        self, seed: int, scope: str, known: Mapping[int, Named], before_write: Callable[[Named], None]
    ) -> None:
        super().__init__()
        self.written: set[Named] = set()
        self._seed, self._known, self._before_write = seed, known, before_write
        self._draws: dict[str, int] = {}
        self._last_draw = scope

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves([args, kwargs]) if isinstance(leaf, torch.Tensor)]
        truncated = _truncated()
        touched = [named for tensor in tensors if (named := self._find_distributed(tensor))]
        if touched and not self._runs_on_shards(func, tensors, truncated):
            raise NeedsFullTensor(touched)
        self._record_writes(func, args, kwargs)
        if func is _aten.normal_.default:
            mean, std = (*args[1:], *(0.0, 1.0)[len(args) - 1 :])
            return self._fill(args[0], truncated, normal_at, scale=std, shift=mean)
        if func is _aten.uniform_.default:
            low, high = (*args[1:], *(0.0, 1.0)[len(args) - 1 :])
            return self._fill(args[0], truncated, uniform_at, scale=high - low, shift=low)
        if func is _aten.any.default and isinstance(args[0], DTensor):
            # trunc_normal_ redraws until no element is out of bounds. Elements are independent, so each rank checks its
            # own shard, without collectives.
            return func(args[0].to_local())
        return func(*args, **kwargs)

    def _find_distributed(self, tensor: torch.Tensor) -> Named | None:
        """Return the model's DTensor that has this tensor's storage, e.g. for the result of `to_local()`."""
        named = self._known.get(storage_key(tensor))
        return named if named and named.is_distributed and storage_key(named.tensor) == storage_key(tensor) else None

    def _runs_on_shards(self, func: Any, tensors: list[torch.Tensor], truncated: torch.Tensor | None) -> bool:
        """Return True if running the operator on local shards gives the same values as on full tensors."""
        if isinstance(truncated, DTensor):
            return self._find(truncated) is not None
        is_random = func in (_aten.normal_.default, _aten.uniform_.default)
        is_listed = is_random or func in ELEMENTWISE or func is _aten.detach.default
        return (
            is_listed and len(tensors) == 1 and isinstance(tensors[0], DTensor) and self._find(tensors[0]) is not None
        )

    def _record_writes(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for tensor in written_tensors(func, args, kwargs):
            named = self._known.get(storage_key(tensor))
            if named is not None and named not in self.written:
                self._before_write(named)
                self.written.add(named)

    def _fill(
        self,
        tensor: torch.Tensor,
        truncated: torch.Tensor | None,
        draw: Callable[[torch.Tensor, int], torch.Tensor],
        *,
        scale: float,
        shift: float,
    ) -> torch.Tensor:
        key = self._next_key(tensor, truncated)
        named = self._find(tensor)
        for block, index in indexed_blocks(tensor, named.name if named else "a temporary tensor"):
            block.copy_(draw(index, key).mul_(scale).add_(shift))
        return tensor

    def _next_key(self, tensor: torch.Tensor, truncated: torch.Tensor | None) -> int:
        """Return a new key for each draw into a tensor.

        Draws into temporary tensors are numbered from the last draw into a parameter. Redraws of `trunc_normal_` are
        numbered separately: ranks redraw different numbers of times, which must not change the values of the next draw.
        """
        named = self._find(tensor)
        if named is not None:
            name = named.name
        elif truncated is not None and self._find(truncated) is not None:
            name = f"{self._last_draw}<again>"
        else:
            name = f"{self._last_draw}<temporary>"
        draw = self._draws[name] = self._draws.get(name, 0) + 1
        if named is not None:
            self._last_draw = f"{name}#{draw}"
        return stream_key(self._seed, name, draw)

    def _find(self, tensor: torch.Tensor) -> Named | None:
        """Return the parameter or buffer if `tensor` covers all of its storage, e.g. its `.data`; else `None`."""
        named = self._known.get(storage_key(tensor))
        if named is None or tensor.shape != named.tensor.shape or tensor.stride() != named.tensor.stride():
            return None
        return named if isinstance(tensor, DTensor) or tensor.storage_offset() == 0 else None


def _truncated() -> torch.Tensor | None:
    """Return the tensor that a running `trunc_normal_` fills, or `None`. Its number of redraws may differ by rank."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") in (__name__, "torch.utils._python_dispatch"):
        frame = frame.f_back
    if frame is None or frame.f_globals is not init.__dict__ or frame.f_code.co_name != "_no_grad_trunc_normal_":
        return None
    return frame.f_locals["tensor"]
