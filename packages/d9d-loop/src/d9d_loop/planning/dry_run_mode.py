"""Fake tensor mode of dry runs, which keeps values of a batch, and answers when the host reads other values.

Models with images read values of their inputs: sizes of images, positions and masks. A tensor of `with_values` has
them, as torch's constants do, and so have results of operations on such tensors alone.
"""

from typing import Any, final

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

_CPU = torch.device("cpu")
_READ_SCALAR = torch.ops.aten._local_scalar_dense.default
_GET_DEVICE = torch.ops.prim.device.default
_EXACT = frozenset((torch.int32, torch.int64, torch.bool))
_RANGES = frozenset((torch.ops.aten.arange, torch.ops.aten.linspace))
_INDEXED = frozenset(
    (*(torch.ops.aten.index, torch.ops.aten.index_put, torch.ops.aten.index_put_, torch.ops.aten._index_put_impl_),)
)


def values_of(tensor: Any) -> Tensor | None:
    """Return the values of a fake tensor, `None` if they are not known."""
    return tensor.constant if isinstance(tensor, FakeTensor) else None


def _is_new(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Return True if an operator creates integers or a range on the CPU, from numbers alone."""
    is_exact = kwargs.get("dtype") in _EXACT or func.overloadpacket in _RANGES
    return is_exact and kwargs.get("device", _CPU) == _CPU and not any(isinstance(each, Tensor) for each in args)


@final
class DryRunMode(FakeTensorMode):
    """Fake tensor mode in which tensors with values have results with values.

    The host reads False for an unknown bool, 1.0 for a float, and 0 for an integer.

    Attributes:
        wholes: Values of a rank's parts of rows, and those of the whole rows, by the address of the former.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._keeps_values = False
        self.wholes: dict[int, tuple[Tensor, Tensor]] = {}

    def with_values(self, tensor: Tensor) -> Tensor:
        """Return a fake tensor with the values of a real one on the CPU. From now on, new integers have values too."""
        self._keeps_values = True
        return self.fake_tensor_converter.from_real_tensor(self, tensor, make_constant=True)

    def may_turn_const(self, t: Tensor) -> bool:
        """Return True if a result has values; torch keeps those of scalars only."""
        return super().may_turn_const(t) or (self._keeps_values and type(t) is Tensor and t.device.type == "cpu")

    def __torch_dispatch__(  # ty: ignore[incompatible-method-override]
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Return the fake result of an operator. The size of a selection depends on the values of its mask."""
        kwargs = kwargs or {}
        if func is _GET_DEVICE and isinstance(args[0], FakeTensor):  # half of all operators; torch answers slowly
            return args[0].fake_device
        if func is _READ_SCALAR and isinstance(args[0], FakeTensor) and args[0].constant is None:
            return False if args[0].dtype == torch.bool else 1.0 if args[0].is_floating_point() else 0
        if not self._keeps_values:
            return super().__torch_dispatch__(func, types, args, kwargs)
        packet, aten = func.overloadpacket, torch.ops.aten
        if packet in _INDEXED:
            args = (args[0], [part for each in args[1] for part in self._indices(each)], *args[2:])
        elif packet is aten.masked_select and values_of(args[0]) is None:
            if (mask := values_of(args[1])) is not None:
                return args[0].new_empty(int(mask.expand(args[0].shape).sum()))
        elif _is_new(func, args, kwargs):
            return self.with_values(func(*args, **kwargs))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _indices(self, index: Tensor | None) -> list[Tensor | None]:
        """Return the indices of the elements that a mask with values selects, or another index."""
        values = values_of(index)
        if values is None or values.dtype not in {torch.bool, torch.uint8}:
            return [index]
        return [self.with_values(each.contiguous()) for each in values.nonzero().unbind(1)]
