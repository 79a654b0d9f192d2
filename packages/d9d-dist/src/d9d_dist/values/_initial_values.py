"""Comparison of a module's values between ranks, before its parameters become shards or replicas of one tensor."""

from collections.abc import Collection

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh

from d9d_dist.collectives.consensus import gather_json
from d9d_dist.errors import UserError, shorten
from d9d_dist.shards import local_tensor
from d9d_dist.values._model_tensors import canonical_name
from d9d_dist.values.checksum import checksum

_SHOWN = 3


@torch.no_grad()
def agree_on_values(module: nn.Module, mesh: DeviceMesh, parameters: Collection[nn.Parameter]) -> None:
    """Raise `UserError` on all ranks of a mesh unless they have the same values of the parameters.

    Parameters on `meta` have no values, which must be so on all ranks. Collective over each axis, except for fake
    tensors. Synchronizes the host with the device once.
    """
    chosen = {id(parameter) for parameter in parameters}
    tensors = {
        canonical_name(name): local_tensor(each) for name, each in module.named_parameters() if id(each) in chosen
    }
    if any(isinstance(each, FakeTensor) for each in tensors.values()):
        return
    valued = {name: each for name, each in tensors.items() if not (each.is_meta or nn.parameter.is_lazy(each))}
    totals = torch.stack([checksum(each) for each in valued.values()]).tolist() if valued else []
    found = {name: f"{tuple(each.shape)} {total}" for (name, each), total in zip(valued.items(), totals, strict=True)}
    names: list[str] = []
    for axis in range(mesh.ndim):  # a later axis passes on what an earlier one has found, so that all ranks raise
        received = {id(each): each for each in gather_json([names, found], mesh.get_group(axis))}.values()  # each once
        every = dict.fromkeys(name for _, values in received for name in values)
        differing = [name for name in every if len({values.get(name) for _, values in received}) > 1]
        names = list(dict.fromkeys([*differing, *(name for each, _ in received for name in each)]))
    if names:
        raise UserError(
            f"the values of {shorten(names, _SHOWN)} differ between the {mesh.size()} ranks that would "
            "share them; expected equal values. Call torch.manual_seed with the same seed on all ranks before the "
            "model is built, or build it on `meta`."
        )
