"""Fake tensor mode of dry runs, whose cache of operators has short keys."""

from typing import Any, final

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode


@final
class DryRunMode(FakeTensorMode):
    """Fake tensor mode that describes a dense tensor in a cache key by one tuple.

    `FakeTensorMode` walks a dataclass of 17 fields and nested sizes for each tensor, which takes half of the time of a
    cached operator. The tuple has the same fields, except those that are constant for dense tensors or follow from the
    sizes and strides. If a version of torch does not call the overridden method, dry runs are slower, but the same.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)

    def _prep_args_for_hash(self, result: list[object], args: Any, *state: Any) -> None:  # ty: ignore[incompatible-method-override]
        if not isinstance(args, list | tuple):
            super()._prep_args_for_hash(result, args, *state)
            return
        result += (type(args), len(args))
        for arg in args:
            if isinstance(arg, list | tuple):
                self._prep_args_for_hash(result, arg, *state)
            elif isinstance(arg, FakeTensor) and self._is_dense(arg):
                result.append(_metadata(arg))
            else:
                super()._prep_args_for_hash(result, (arg,), *state)

    def _is_dense(self, tensor: FakeTensor) -> bool:
        return tensor.fake_mode is self and tensor.constant is None and tensor.layout is torch.strided


def _metadata(tensor: FakeTensor) -> tuple[object, ...]:
    return (
        tensor.dtype,
        tensor.shape,
        tensor.stride(),
        tensor.fake_device,
        tensor.storage_offset(),
        tensor.untyped_storage().nbytes(),
        tensor.requires_grad,
        tensor.is_quantized,
        tensor.is_conj(),
        tensor.is_neg(),
        tensor.is_inference(),
    )
