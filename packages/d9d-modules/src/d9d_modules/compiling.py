"""Regional compilation: `torch.compile` for each layer of a model."""

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from d9d_dist import UserError
from d9d_dist.gradients.grad_dtype import hide_wide_gradients
from d9d_dist.groups.symmetric_memory import enable_symmetric_memory


def compile_layers(layers: nn.ModuleDict, *, async_tensor_parallel: DeviceMesh | None = None, **options: Any) -> None:
    """Compile each layer in place with the given options of `torch.compile`; parameter names stay the same.

    Identical layers share one compiled graph, so compile time does not grow with the number of layers. FSDP can
    all-gather the parameters of the next layer between graphs. Call this function after `parallelize_tensor` and
    `checkpoint_layers`, before `parallelize_hsdp`.

    Changes of Python objects in a checkpointed layer's forward, such as a counter, are not repeated when the layer is
    recomputed. This sets torch's global option `skip_fwd_side_effects_in_bwd_under_checkpoint`. Gradients of another
    dtype than their parameters do not prevent compilation, in all of the process.

    Args:
        layers: Layers by name.
        async_tensor_parallel: Tensor-parallel axis whose collectives overlap with matrix products, or None. Inductor
            replaces an all-gather and the products that read it, and a product and its reduce-scatter, by kernels of
            torch that exchange parts of the activation while they multiply other parts. These kernels need symmetric
            memory (`enable_symmetric_memory`). All-reduces, and reduce-scatters of a sum of products, do not overlap. A
            mesh of one rank has no effect.
        **options: Options of `torch.compile`.

    Raises:
        UserError: If `async_tensor_parallel` is set, but the backend is not inductor, or the devices cannot access each
            other's memory.
    """
    if async_tensor_parallel is not None and async_tensor_parallel.size() > 1:
        if (backend := options.get("backend", "inductor")) != "inductor":
            raise UserError(f"async_tensor_parallel: got backend = {backend!r}; expected 'inductor'.")
        enable_symmetric_memory(async_tensor_parallel, setting="async_tensor_parallel")
        options["options"] = {**(options.get("options") or {}), "_micro_pipeline_tp": True}
    # Without this option, checkpointed layers that assign their own attributes in forward run eagerly, for example
    # under tensor parallelism.
    torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True  # ty: ignore[invalid-assignment]
    hide_wide_gradients()
    for layer in layers.values():
        layer.compile(**options)
