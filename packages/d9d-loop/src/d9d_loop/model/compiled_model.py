"""Compilation of a job's model by `torch.compile`, with a report of the graph breaks."""

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn

from d9d_dist import UserError
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
    prevent compilation. The last three behaviors are global settings of torch.
    """
    torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True  # ty: ignore[invalid-assignment]
    torch._dynamo.config.trace_numpy = False  # ty: ignore[invalid-assignment]
    hide_wide_gradients()
    for stage in stages:
        stage.forward = torch.compile(stage.forward, backend=backend)


def describe_graph_breaks() -> list[str]:
    """Return a line for each graph break: its place in the user's code, and the reason. No duplicates."""
    from torch._dynamo.utils import graph_break_reasons  # noqa: PLC0415 - takes a second without compile

    torch_folder, lines = str(Path(torch.__file__).parent), {}
    for found in graph_break_reasons:
        frames = [each for each in found.user_stack if not each.filename.startswith(torch_folder)] or found.user_stack
        place = describe_frame(frames[-1]) if frames else "unknown place"
        lines[f"  {place} ({found.reason.splitlines()[0]})"] = None
    return list(lines)
