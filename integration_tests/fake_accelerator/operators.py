"""Operators of the fake accelerator: torch's meta kernels compute output shapes; no values are computed."""

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry

from fake_accelerator.device_log import DeviceEntry

NAME = "fakegpu"
"""Type of the device."""

# Operators whose result sizes depend on values: an accelerator computes the size, and the host waits for the size.
_SIZES_FROM_VALUES = frozenset(
    {"nonzero", "masked_select", "bincount", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive"}
)
# Operators that torch's C++ code decomposes, although an accelerator has a single kernel for each of them.
_ONE_KERNEL = ("_chunk_cat", "_chunk_cat.out", "_grouped_mm", "_fused_rms_norm", "_fused_rms_norm_backward")
_SDPA = "_scaled_dot_product_fused_attention_overrideable"
_OWN_FILES = tuple(str(Path(__file__).with_name(name)) for name in ("operators.py", "fake_ranks.py"))
_NOT_COMPUTING = ("empty", "new_empty", "detach", "alias", "view", "_unsafe_view", "record_stream")


@final
class Operators:
    """Fallback kernel for all operators on the device; keeps the details of recorded operators and host waits.

    Attributes:
        details: Log entries of operators and host waits, by their index in the log.
        answers: Functions from the shape of a read tensor to the values that the host reads, by the name of the reading
            function.
    """

    def __init__(self, extension: Any) -> None:
        self._extension = extension
        self.details: dict[int, DeviceEntry] = {}
        self.answers: dict[str, Callable[[tuple[int, ...]], Any]] = {}
        self._libraries = [torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL", "PrivateUse1")]
        self._libraries[0].fallback(self._run, "PrivateUse1")
        aten = self._libraries[1]
        for name in _ONE_KERNEL:
            packet, _, overload = name.partition(".")
            if hasattr(torch.ops.aten, packet):
                aten.impl(name, self._kernel(getattr(getattr(torch.ops.aten, packet), overload or "default")))
        aten.impl(_SDPA, self._attention)
        aten.impl(f"{_SDPA}_backward", self._attention_backward)
        aten.impl("record_stream", lambda tensor, stream: None)
        for name in torch._C._dispatch_get_all_op_names():
            namespace, _, rest = name.partition("::")
            if namespace == "aten" and rest.startswith(("_foreach_", "_fused_")) and "out" not in rest:
                self._own_list_kernel(aten, rest)
        extension.set_host_wait(self.host_wait)

    def _own_list_kernel(self, aten: torch.library.Library, name: str) -> None:
        """Register an operator on lists of tensors, which is a single kernel on an accelerator."""
        packet, _, overload = name.partition(".")
        operator = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
        if operator is None or packet in _ONE_KERNEL:
            return
        if operator._schema.returns:
            aten.impl(name, self._kernel(operator))
            return

        def update(*args: Any, **kwargs: Any) -> None:
            tensors = self._device_tensors(operator, args, kwargs)
            self.put(packet, 0, sum(map(_num_bytes, tensors)), tensors)

        aten.impl(name, update)

    def _kernel(self, operator: Any) -> Callable[..., Any]:
        return lambda *args, **kwargs: self._run(operator, *args, **kwargs)

    def put(self, name: str, flops: int, num_bytes: int, tensors: list[Tensor]) -> None:
        """Record a kernel on the current stream."""
        index = self._extension.put_operator(-1)
        if index >= 0:
            self.details[index] = DeviceEntry("kernel", 0, name, num_bytes, flops, shapes=_shapes(tensors))

    def put_collective(self, name: str, num_bytes: int, tensors: list[Tensor], *, stream: int, num_ranks: int) -> None:
        """Record a collective on a stream."""
        index = self._extension.put_operator(stream)
        if index >= 0:
            shapes = _shapes(tensors)
            self.details[index] = DeviceEntry("collective", 0, name, num_bytes, 0, num_ranks, _stack(), shapes)

    def host_wait(self, reason: str, read: Tensor | None) -> None:
        """Record a host wait. If the host reads into `read`, fill it with the values that `answer` set, if any."""
        index = self._extension.put_host_wait()
        stack = _stack() if index >= 0 or (read is not None and self.answers) else ()
        if index >= 0:
            self.details[index] = DeviceEntry("host wait", 0, reason, stack=stack)
        if read is not None:
            for frame in stack:
                if (answer := self.answers.get(frame.rpartition(" ")[2])) is not None:
                    read.copy_(torch.as_tensor(answer(tuple(read.shape)), dtype=read.dtype))
                    return

    def _device_tensors(self, operator: Any, args: Any, kwargs: Any) -> list[Tensor]:
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        on_device = [tensor for tensor in tensors if tensor.device.type == NAME]
        elsewhere = [tensor for tensor in tensors if tensor.device.type == "cpu" and tensor.dim() > 0]
        if on_device and elsewhere:
            raise RuntimeError(
                f"{operator} got tensors on {NAME}, and CPU tensors of shapes "
                f"{[tuple(each.shape) for each in elsewhere]}; expected all on one device. Called from {_stack()[:4]}."
            )
        return on_device

    def _run(self, operator: Any, *args: Any, **kwargs: Any) -> Any:
        name = operator._schema.name.partition("::")[2]
        inputs = self._device_tensors(operator, args, kwargs)
        if name in _SIZES_FROM_VALUES or (name == "repeat_interleave" and kwargs.get("output_size") is None):
            self.host_wait(f"size of {name}", None)
        if name == "equal":
            self.host_wait("equal", None)
            return True
        if name == "nonzero":
            self.put(name, 0, sum(map(_num_bytes, inputs)), inputs)
            return torch.empty((args[0].numel() // 2, args[0].dim()), dtype=torch.int64, device=NAME)
        mirror = _Mirror(inputs)
        try:
            arguments, keywords = mirror.arguments(operator, args), mirror.to_meta(kwargs)
            with torch.no_grad():
                result = operator(*arguments, **keywords)
        except Exception as error:
            error.add_note(f"on {NAME}: {operator} of {[tuple(each.shape) for each in inputs]}, from {_stack()[:6]}")
            raise
        outputs = mirror.to_device(result)
        if not operator.is_view and not name.startswith(_NOT_COMPUTING):
            count = flop_registry.get(operator.overloadpacket)
            # Count on the meta arguments: given device tensors, torch would read sequence lengths from the device.
            flops = 0 if count is None else int(count(*arguments, **keywords, out_val=result))
            known = {id(tensor): tensor for tensor in (*inputs, *_tensors(outputs))}
            self.put(name, flops, sum(map(_num_bytes, known.values())), inputs)
        return outputs

    def _attention(self, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Any:
        batch, heads, length, _ = q.shape
        out = torch.empty((batch, length, heads, v.shape[-1]), dtype=q.dtype, device=q.device).transpose(1, 2)
        sums = torch.empty((batch, heads, length), dtype=torch.float32, device=q.device)
        flops = 2 * batch * heads * length * k.shape[2] * (q.shape[-1] + v.shape[-1])
        self.put(_SDPA, flops, sum(map(_num_bytes, (q, k, v, out, sums))), [q, k, v])
        offsets = [torch.empty(0, dtype=torch.int32, device=q.device) for _ in range(2)]
        seeds = [torch.zeros((), dtype=torch.int64) for _ in range(2)]
        return out, sums, *offsets, length, k.shape[2], *seeds, torch.empty(0, device=q.device)

    def _attention_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Any, *args: Any, **kwargs: Any
    ) -> Any:
        batch, heads, length, width = q.shape
        flops = 2 * batch * heads * length * k.shape[2] * (3 * width + 2 * v.shape[-1])
        grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        bias_grad = torch.empty_like(bias) if isinstance(bias, Tensor) else None
        self.put(f"{_SDPA}_backward", flops, sum(map(_num_bytes, (grad, q, k, v, *grads))), [q, k, v])
        return *grads, bias_grad


class _Mirror:
    """Conversion of an operator call's tensors from the device to meta, and of its results back."""

    def __init__(self, inputs: list[Tensor]) -> None:
        self._meta = {id(tensor): (tensor, _meta_like(tensor)) for tensor in inputs}

    def to_meta(self, tree: Any) -> Any:
        return pytree.tree_map(self._leaf_to_meta, tree)

    def _leaf_to_meta(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            known = self._meta.get(id(leaf))
            return leaf if known is None else known[1]
        return torch.device("meta") if isinstance(leaf, torch.device) and leaf.type == NAME else leaf

    def arguments(self, operator: Any, args: tuple[Any, ...]) -> list[Any]:
        """Return the positional arguments on meta; numbers become tensors where the schema expects tensors."""
        return [
            torch.tensor(value) if isinstance(value, (int, float)) and str(wanted.type) == "Tensor" else value
            for value, wanted in zip(self.to_meta(list(args)), operator._schema.arguments, strict=False)
        ]

    def to_device(self, tree: Any) -> Any:
        for tensor, meta in self._meta.values():
            if meta.shape != tensor.shape:  # the operator resized an output
                tensor.resize_(meta.shape)
        return pytree.tree_map(self._leaf_to_device, tree)

    def _leaf_to_device(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.device.type != "meta":
            return leaf
        for tensor, meta in self._meta.values():
            if leaf is meta:
                return tensor
            if leaf._is_view() and leaf._base is meta:
                return tensor.as_strided(leaf.shape, leaf.stride(), tensor.storage_offset() + leaf.storage_offset())
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=NAME)


def _meta_like(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _shapes(tensors: list[Tensor]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(tensor.shape) for tensor in tensors)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _stack() -> tuple[str, ...]:
    """Return the frames of the caller outside of torch and of this device, innermost first."""
    frames = reversed(traceback.extract_stack(limit=60))
    return tuple(
        f"{'/'.join(frame.filename.split('/')[-2:])}:{frame.lineno} {frame.name}"
        for frame in frames
        if "/torch/" not in frame.filename and frame.filename not in _OWN_FILES
    )
