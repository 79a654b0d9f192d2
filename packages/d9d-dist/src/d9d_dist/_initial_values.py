"""Comparison of a module's values between ranks, before its parameters become shards or replicas of one tensor."""

from collections.abc import Collection

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh

from d9d_dist._model_tensors import canonical_name
from d9d_dist.checksum import checksum
from d9d_dist.consensus import gather_json
from d9d_dist.errors import UserError
from d9d_dist.shards import local_tensor

_SHOWN = 3


@torch.no_grad()
def agree_on_values(module: nn.Module, mesh: DeviceMesh, parameters: Collection[nn.Parameter]) -> None:
    """Raise `UserError` on all ranks of a mesh unless they have the same values of the parameters.

    Collective over each axis, unless all parameters are on `meta`. Synchronizes the host with the device once.
    """
    chosen = {id(parameter) for parameter in parameters}
    sums = {
        canonical_name(name): (tuple(parameter.shape), checksum(local))
        for name, parameter in module.named_parameters()
        if id(parameter) in chosen
        and not (
            (local := local_tensor(parameter)).is_meta or isinstance(local, FakeTensor) or nn.parameter.is_lazy(local)
        )
    }
    if not sums:
        return
    totals = torch.stack([total for _, total in sums.values()]).tolist()
    found = {name: f"{shape} {total}" for (name, (shape, _)), total in zip(sums.items(), totals, strict=True)}
    names: list[str] = []
    for axis in range(mesh.ndim):  # a later axis passes on what an earlier one has found, so that all ranks raise
        received = gather_json([names, found], mesh.get_group(axis))
        every = dict.fromkeys(name for _, values in received for name in values)
        differing = [name for name in every if len({values.get(name) for _, values in received}) > 1]
        names = list(dict.fromkeys([*differing, *(name for each, _ in received for name in each)]))
    if names:
        more = f" and {len(names) - _SHOWN} more" if names[_SHOWN:] else ""
        raise UserError(
            f"the values of {', '.join(names[:_SHOWN])}{more} differ between the {mesh.size()} ranks that would "
            "share them; expected equal values. Call torch.manual_seed with the same seed on all ranks before the "
            "model is built, or build it on `meta`."
        )
