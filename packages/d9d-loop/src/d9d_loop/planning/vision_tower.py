"""Vision tower of a job: its kernels from a run on fake tensors, and their time.

Each rank of the first stage computes the images of its samples, also the ranks of tensor and context parallelism.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from math import ceil, prod
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from d9d_loop.job.flop_formula import ImageFlops
from d9d_loop.planning.decoder_shape import DecoderShape, Kernel, Tower
from d9d_loop.planning.hardware_spec import Hardware
from d9d_loop.planning.kernel_time import attention_seconds, matmul_seconds, peak_of, pointwise_seconds
from d9d_loop.planning.layer_time import PassTime
from d9d_loop.planning.plan_layout import PlanLayout
from d9d_loop.planning.step_record import Operation, recorded

_NOT_USED = frozenset(("last_hidden_state", "hidden_states", "attentions"))
"""Entries of the features that the language model does not take."""
_PRODUCTS = frozenset(("mm", "addmm", "bmm", "baddbmm"))
_QUERIES_PER_TILE = 128


@final
class TowerCall:
    """Call of `get_image_features` in a forward of a model, whose methods are replaced; none of a model without it."""

    def __init__(self, model: nn.Module) -> None:
        self._model: Any = model
        self._call: Any = None
        for module in model.modules():
            if (function := getattr(module, "get_image_features", None)) is not None:
                module.get_image_features = partial(self._keep, function)  # ty: ignore[invalid-assignment]

    def _keep(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        self._call = partial(function, *args, **kwargs)
        return function(*args, **kwargs)

    def tower(self, inputs: Mapping[str, Any], *, num_samples: int) -> Tower | None:
        """Run the tower and its backward pass on fake tensors; `None` if the model did not call it.

        `inputs` are the inputs of the model, with values.
        """
        if self._call is None:
            return None
        of_texts = {*self._model.get_decoder().parameters()}
        parameters = [each for each in self._model.base_model.parameters() if each not in of_texts]
        scale = 2 / parameters[0].element_size()
        with recorded() as record:
            features = self._call()
            num_forward, saved_bytes = len(record.operations), record.peak_bytes
            used = [each for name, each in features.items() if name not in _NOT_USED]
            found = [each for each in pytree.tree_leaves(used) if isinstance(each, Tensor) and each.requires_grad]
            torch.autograd.backward(found, [torch.empty_like(each) for each in found])
        return Tower(
            num_parameters=sum(each.numel() for each in parameters),
            num_samples=num_samples,
            num_patches=_num_patches(inputs, self._model.config.vision_config),
            forward=_kernels(record.operations[:num_forward], scale),
            backward=_kernels(record.operations[num_forward:], scale),
            saved_bytes=saved_bytes * scale,
        )


def _num_patches(inputs: Mapping[str, Any], config: Any) -> float:
    """Return the number of patches of the images among a model's inputs."""
    size = config.patch_size
    size = size if isinstance(size, int) else size[0]
    has_sizes = "image_sizes" in inputs and inputs["pixel_values"].dim() == len("NCHW")
    images = ImageFlops(per_patch=1.0, patch_size=size if has_sizes else None)
    return float(images.of(inputs)) / (1 if has_sizes or "image_grid_thw" in inputs else size**2)


def _kernels(operations: Sequence[Operation], scale: float) -> tuple[Kernel, ...]:
    found = Counter((each.name, each.flops, each.num_bytes * scale, each.shapes) for each in operations)
    return tuple(Kernel(*each, number) for each, number in found.items())


def tower_time(shape: DecoderShape, layout: PlanLayout, hardware: Hardware) -> tuple[PassTime, PassTime]:
    """Return the times of the images of a microbatch, forward, and backward with recomputation."""
    tower = shape.tower
    if tower is None:
        return PassTime(), PassTime()
    factor = layout.microbatch_size / tower.num_samples
    forward, backward = (
        sum((_kernel_time(each, hardware).times(factor * each.number) for each in kernels), PassTime())
        for kernels in (tower.forward, tower.backward)
    )
    return forward, backward + forward if layout.recompute == "full" else backward


def _kernel_time(kernel: Kernel, hardware: Hardware) -> PassTime:
    if "scaled_dot_product" in kernel.name:
        is_backward = "backward" in kernel.name
        query, key = kernel.shapes[is_backward : is_backward + 2]
        seconds = attention_seconds(
            hardware,
            kernel.flops,
            keys=key[-2],
            head_dim=query[-1],
            num_tiles=prod(query[:-2]) * ceil(query[-2] / _QUERIES_PER_TILE),
            backward=is_backward,
        )
        return PassTime(attention=seconds, operators=1)
    moved = pointwise_seconds(hardware, kernel.num_bytes)
    if not kernel.flops:
        return PassTime(pointwise=moved, operators=1)
    if kernel.name not in _PRODUCTS:
        rate = peak_of(hardware, "bf16") * hardware.fitted.matmul_efficiency
        return PassTime(matmul=max(kernel.flops / rate, moved), operators=1)
    left, right = kernel.shapes[-2:]
    (m, k), n = left[-2:], right[-1]
    aligned = not (k % 2 or n % 2)
    return PassTime(matmul=matmul_seconds(hardware, m, n, k, batch=prod(left[:-2]), aligned=aligned), operators=1)
