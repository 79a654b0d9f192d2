"""Frozen base weights that are stored block-quantized and dequantized in each forward and backward pass (QLoRA).

Dettmers et al., "QLoRA: Efficient Finetuning of Quantized LLMs" (https://arxiv.org/abs/2305.14314), equation 5, without
double quantization of the scales.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from d9d_dist import UserError, local_tensor
from d9d_dist.errors import shorten
from d9d_peft._grouped import grouped_product
from d9d_peft._targets import Target, check_target, is_target
from d9d_peft.adapter import adapters_of
from d9d_peft.all_linear import is_conv1d, weight_of
from d9d_peft.block_format import BlockFormat, dequantize_blocks, quantize_blocks, quantize_weight
from d9d_peft.dora import DoraAdapter
from d9d_state import StateMapper, identity, identity_of, parallel

_CHILD = "quantized"


@final
class QuantizedWeight(nn.Module):
    """Scales of a layer whose parameter `weight` holds the codes.

    Attributes:
        scales: Bytes of the float32 scales [..., out, 4 * blocks], uint8, so that no cast of a model rounds them.
    """

    def __init__(self, scales: Tensor, block_format: BlockFormat, block_size: int) -> None:
        super().__init__()
        self.scales = nn.Parameter(scales, requires_grad=False)
        self.block_format: BlockFormat = block_format
        self.block_size = block_size

    def forward(self, codes: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the dense weight; called as a module, so that its scales are local tensors."""
        return dequantize_blocks(codes, self.scales, self.block_format, dtype=dtype)

    def tensor_placements(self, weight: Placement) -> Mapping[str, Placement]:
        """Split the scales with the codes; see `FollowsWeight`."""
        return {"scales": weight} if isinstance(weight, Shard) else {}

    def prepare_tensor(self, weight: Placement, mesh: DeviceMesh) -> None:
        """See `FollowsWeight`."""
        dim = self.scales.ndim - 1
        if isinstance(weight, Shard) and weight.dim % self.scales.ndim == dim:
            num_blocks = self.scales.shape[-1] // 4
            if num_blocks % mesh.size():
                raise UserError(
                    f"tensor parallelism splits {num_blocks} blocks of {self.block_size} input features over "
                    f"{mesh.size()} ranks; expected whole blocks on each rank. Use a smaller block_size."
                )

    def extra_repr(self) -> str:
        """Return the format for `print(model)`."""
        return f"{self.block_format}, block_size={self.block_size}"


def quantize_base(
    model: nn.Module, target: Target = nn.Module, *, block_format: BlockFormat = "nf4", block_size: int = 64
) -> StateMapper:
    """Quantize the frozen weights of linear layers and grouped experts, in place, one layer at a time.

    Call `quantize_base` after `inject`, before parallelization. The parameter `weight` of a layer then holds the codes,
    which FSDP and tensor parallelism shard like a weight; a child `quantized` holds the scales. Each forward pass
    builds the dense weight of one layer in the dtype of its input and frees it; the backward pass builds it again.
    `torch.compile` does not compile quantized layers.

    Materialized weights are quantized immediately; weights on `meta` are quantized when the returned mapper loads them:
    each rank reads its shard of a weight, and keeps only the codes and scales. No rank then holds the dense model.

    Memory of a weight: NF4 (4 + 32 / block_size) bits per element, int8 (8 + 32 / block_size) bits.

    Args:
        model: Model on one device or on `meta`.
        target: Regular expression, searched in the names of modules, or module types; by default all linear layers and
            grouped experts with a frozen weight.
        block_format: `"nf4"` or `"int8"`.
        block_size: Number of input features that share a scale; even, and divides the input features of each layer.

    Returns:
        The mapper from the dense weights of the model to its codes and scales; other tensors pass through.
        `sequential(base_mapper, injected, mapper)` loads a dense checkpoint, where `injected` is the result of
        `inject`. The inverse yields the dequantized weights, with which the model computes, in the dtype that the
        weights had before the call.

    Raises:
        UserError: If an argument is invalid, or no layer matches. Also if a matching layer is a `Conv1D`, has DoRA or a
            tied weight, is already quantized or parallelized, or its number of input features is not a multiple of
            `block_size`. The model is then unchanged.
    """
    check_target(target, "quantize_base")
    if block_format not in ("nf4", "int8"):
        raise UserError(f"quantize_base got block_format = {block_format!r}; expected 'nf4' or 'int8'.")
    if block_size < 2 or block_size % 2:
        raise UserError(f"quantize_base got block_size = {block_size}; expected an even number of at least 2.")
    layers = {
        name: module
        for name, module in model.named_modules()
        if (name == "" or is_target(target, name, module)) and _is_frozen_layer(module)
    }
    if not layers:
        raise UserError(
            f"quantize_base got the target {target!r:.40}, which matches no linear layer or grouped experts with a "
            "frozen weight. Call inject() first, or widen the target."
        )
    if problems := _problems(model, layers, block_size):
        raise UserError(f"cannot quantize {shorten(problems)}. Narrow the target.")
    given, mappers = identity_of(model), []
    for name, layer in layers.items():
        weight = weight_of(layer)
        prefix = f"{name}." if name else ""
        names = (f"{prefix}weight", f"{prefix}{_CHILD}.scales")
        mappers.append(quantize_weight(*names, block_format, block_size, weight.dtype))
        codes, scales = quantize_blocks(weight.detach(), block_format, block_size)
        layer._parameters["weight"] = nn.Parameter(codes, requires_grad=False)
        layer.add_module(_CHILD, QuantizedWeight(scales, block_format, block_size))
        # The instance attribute shadows the class's forward, and the forward of an adapter.
        # torch.compile does not support hooks on saved tensors and replaced parameters.
        forward = torch.compiler.disable(_dequantized_forward)
        layer.forward = partial(forward, layer, layer.forward)  # deepcopy copies the arguments of a partial
        layer.reset_parameters = partial(_refuse_reset, names[0])
    quantized = {name for mapper in mappers for name in mapper.inputs}
    return parallel(identity(*(name for name in given.inputs if name not in quantized)), *mappers)


def is_quantized(layer: nn.Module) -> bool:
    """Return True if `quantize_base` has quantized a layer."""
    return isinstance(layer._modules.get(_CHILD), QuantizedWeight)


def _refuse_reset(name: str) -> None:
    raise UserError(
        f"{name} is quantized, and codes have no initial values to draw; expected the values of a dense weight. Set "
        "late_init = False in the model provider, and load initial weights or build the model with values."
    )


def _dequantized_forward(layer: nn.Module, inner: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """Call the forward of a layer with its dense weight, which autograd does not keep for the backward pass."""
    codes, quantized, dtype = layer._parameters["weight"], layer._modules[_CHILD], args[0].dtype
    assert isinstance(quantized, QuantizedWeight)
    with torch.no_grad():
        dense = quantized(codes, dtype)
    storage = dense.untyped_storage().data_ptr()

    def pack(saved: Tensor) -> Any:
        if saved.untyped_storage().data_ptr() != storage:
            return saved
        return saved.shape, saved.stride(), saved.storage_offset()

    def unpack(packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        # In backward, FSDP has gathered the layer's parameters again.
        again, scales = local_tensor(weight_of(layer)), local_tensor(quantized.scales)
        return dequantize_blocks(again, scales, quantized.block_format, dtype=dtype).as_strided(*packed)

    layer._parameters["weight"] = dense  # only while forward runs
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return inner(*args, **kwargs)
    finally:
        layer._parameters["weight"] = codes


def _is_frozen_layer(module: nn.Module) -> bool:
    weight = module._parameters.get("weight")
    is_layer = isinstance(module, nn.Linear) or is_conv1d(module) or grouped_product(module) is not None
    return is_layer and weight is not None and not weight.requires_grad


def _problems(model: nn.Module, layers: Mapping[str, nn.Module], block_size: int) -> list[str]:
    users = Counter(id(parameter) for module in model.modules() for parameter in module._parameters.values())
    problems: list[str] = []
    for name, layer in layers.items():
        weight = weight_of(layer)
        reasons = {
            "is a Conv1D of transformers, with a transposed weight": is_conv1d(layer),
            "has a tied weight": users[id(weight)] > 1,
            "is parallelized": isinstance(weight, DTensor),
            "is already quantized": is_quantized(layer),
            "has DoRA, whose norms need the dense weight": any(
                isinstance(adapter, DoraAdapter) for adapter in adapters_of(layer).values()
            ),
            f"has {weight.shape[-1]} input features, not a multiple of block_size = {block_size}": weight.shape[-1]
            % block_size
            != 0,
        }
        problems += [f"{name or 'the model'}, which {reason}" for reason, holds in reasons.items() if holds][:1]
    return problems
