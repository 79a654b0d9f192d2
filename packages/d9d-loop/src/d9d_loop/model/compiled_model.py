"""Compilation of a job's model by `torch.compile`, with a report of the graph breaks."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from d9d_dist import UserError, canonical_name, local_tensor
from d9d_dist.errors import shorten
from d9d_dist.gradients.grad_dtype import hide_wide_gradients
from d9d_loop.user_frames import describe_frame


def check_backend(name: str) -> None:
    """Raise `UserError` unless `torch.compile` has a backend of this name."""
    known = torch._dynamo.list_backends(exclude_tags=())
    if name not in known:
        raise UserError(
            f"compile = {name!r} is not a backend of torch.compile; expected one of {', '.join(sorted(known))}. Use "
            "inductor."
        )


def compile_stages(stages: Iterable[nn.Module], backend: str) -> None:
    """Compile the forward of parallelized stages, in place. The first call compiles.

    Hooks of the stage, such as FSDP's, run outside of the compiled code. Code that cannot be compiled runs eagerly.
    NumPy also runs eagerly, because torch emulates some of its functions incorrectly. When a checkpointed module is
    recomputed, its changes of Python objects are not repeated. Gradients of another dtype than their parameters do not
    prevent compilation. The last three behaviors are global settings of torch. After the first call, a line on rank 0
    names buffers that the stage writes in place.
    """
    torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True  # ty: ignore[invalid-assignment]
    torch._dynamo.config.trace_numpy = False  # ty: ignore[invalid-assignment]
    hide_wide_gradients()
    for stage in stages:
        stage.forward = torch.compile(stage.forward, backend=backend)
        _name_written_buffers(stage)


def describe_graph_breaks() -> list[str]:
    """Return a line for each graph break: its place in the user's code, and the reason. No duplicates."""
    from torch._dynamo.utils import graph_break_reasons  # noqa: PLC0415 - takes a second without compile

    torch_folder, lines = str(Path(torch.__file__).parent), {}
    for found in graph_break_reasons:
        frames = [each for each in found.user_stack if not each.filename.startswith(torch_folder)] or found.user_stack
        place = describe_frame(frames[-1]) if frames else "unknown place"
        lines[f"  {place} ({found.reason.splitlines()[0]})"] = None
    return list(lines)


def _name_written_buffers(stage: nn.Module) -> None:
    """Print the buffers, except those of torch's layers, to which the first call with gradients writes in place."""
    before: dict[str, int] = {}

    def start(*_: Any) -> None:
        before.update(_versions(stage))

    def end(*_: Any) -> None:
        if not torch.is_grad_enabled():
            return
        for hook in hooks:
            hook.remove()
        written = [name for name, version in _versions(stage).items() if before.get(name, version) != version]
        if written and not (dist.is_initialized() and dist.get_rank()):
            print(
                f"d9d: compiled code writes to {shorten(written)} in place. If forward also reads it, torch computes "
                "wrong gradients. Assign a new tensor: self.scale = self.scale * 0.5 instead of self.scale.mul_(0.5)."
            )

    hooks = [stage.register_forward_pre_hook(start), stage.register_forward_hook(end)]


def _versions(stage: nn.Module) -> dict[str, int]:
    """Return by name how often each buffer was written."""
    return {
        canonical_name(f"{name}.{key}".lstrip(".")): local_tensor(buffer)._version
        for name, module in stage.named_modules()
        if not type(module).__module__.startswith("torch.nn.modules.")
        for key, buffer in module._buffers.items()
        if buffer is not None
    }
