"""Context parallelism as one function over a module and a mesh axis: attention functions are replaced, nothing else."""

from typing import Literal, Protocol, runtime_checkable

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from d9d_dist._mesh_axes import only_axis
from d9d_dist.context_parallel.all_gather import AllGatherAttention
from d9d_dist.context_parallel.all_to_all import AllToAllAttention
from d9d_dist.context_parallel.attention import Attention, is_plain
from d9d_dist.context_parallel.ring import RingAttention
from d9d_dist.errors import UserError

ContextMethod = Literal["all_gather", "all_to_all", "ring"]


@runtime_checkable
class HasAttention(Protocol):
    """A module that attends by a function that can be replaced.

    Attributes:
        attention_function: The function.
    """

    attention_function: Attention


@runtime_checkable
class NeedsWholeRows(Protocol):
    """A module that no rank can compute from its part of the positions alone, and that has no other form.

    Attributes:
        why_whole_rows: What it does that needs them, as the end of a sentence that starts with its name; None where it
            does not do that, as it is configured.
    """

    @property
    def why_whole_rows(self) -> str | None: ...  # noqa: D102  (see Attributes)


def context_parallel_attention(attention: Attention, mesh: DeviceMesh, *, method: ContextMethod) -> Attention:
    """The context-parallel form of an attention function: takes and gives this rank's part of the rows.

    On a mesh of one rank it is the function itself.

    Args:
        attention: The function that computes attention over whole rows.
        mesh: A mesh of one axis, over which rows are split by `ContextSplit`, e.g. `ctx.mesh_for("batch")["cp"]`.
        method: `"all_gather"` takes any function and any number of heads; `"all_to_all"` any function, and moves less
            where there are few query heads for each key/value head; `"ring"` never holds a whole row, and has kernels
            of its own for `sdpa_attention` and whatever says that it computes the same (`DeclaresPlain`).

    Raises:
        UserError: If the mesh does not have exactly one axis, the function is context parallel already, the method is
            unknown, or it is `"ring"` and the function computes something else than `sdpa_attention`.
    """
    only_axis(mesh, example="cp")
    if isinstance(attention, AllGatherAttention | AllToAllAttention | RingAttention):
        raise UserError(
            f"got the attention function {type(attention).__name__}, which is context parallel already; expected one "
            "for whole rows. Apply context parallelism once."
        )
    if mesh.size() == 1:
        return attention
    match method:
        case "all_gather":
            return AllGatherAttention(attention, mesh)
        case "all_to_all":
            return AllToAllAttention(attention, mesh)
        case "ring":
            if not is_plain(attention):
                raise UserError(
                    f"got the attention function {attention!r} with method = 'ring'; expected sdpa_attention or one "
                    "whose is_plain is true, which the ring computes by kernels of its own. Use 'all_gather' or "
                    "'all_to_all' for other functions."
                )
            return RingAttention(mesh)
        case _:
            raise UserError(f"got method = {method!r}; expected 'all_gather', 'all_to_all' or 'ring'.")


def parallelize_context(module: nn.Module, mesh: DeviceMesh, *, method: ContextMethod = "all_gather") -> None:
    """Let the ranks of a mesh axis share every row's positions out, in place; see `context_parallel_attention`.

    The attention function of every submodule that is a `HasAttention` is replaced; everything else in a model works on
    single positions and is left as it is. Batches go through `ContextSplit.split`, with the position ids of
    `ContextSplit.positions` where they bring none. Ranks compute different tokens with equal parameters, so gradients
    must be summed over this axis too: let data parallelism span `dp_cp_shard` and `cp_replicate` of the dense mesh.
    Call it before compiling. On a mesh of one rank there is nothing to do.

    Args:
        module: The module to parallelise, on any device.
        mesh: A mesh of one axis, e.g. `ctx.mesh_for("batch")["cp"]`.
        method: How ranks see each other's keys and values.

    Raises:
        UserError: If no submodule is a `HasAttention`, one is context parallel already, its function is a module, one
            is a `NeedsWholeRows` and there are ranks to share rows out to, or the mesh or the method is not one that
            `context_parallel_attention` takes; nothing is replaced then.
    """
    only_axis(mesh, example="cp")
    if mesh.size() > 1:
        _check_rows_may_be_split(module, mesh.size())
    found = {name: each for name, each in module.named_modules() if isinstance(each, HasAttention)}
    if not found and not any(isinstance(each, NeedsWholeRows) for each in module.modules()):
        raise UserError(
            f"no submodule of {type(module).__name__} is a HasAttention; expected at least one that attends by its "
            "attribute attention_function. Give your attention module one, e.g. sdpa_attention."
        )
    for name, each in found.items():
        if isinstance(each.attention_function, nn.Module):
            raise UserError(
                f"the attention_function of {name or 'the module'} is the module "
                f"{type(each.attention_function).__name__}; expected a function, which can be replaced without losing "
                "parameters."
            )
    forms = [context_parallel_attention(each.attention_function, mesh, method=method) for each in found.values()]
    for each, form in zip(found.values(), forms, strict=True):
        each.attention_function = form


def _check_rows_may_be_split(module: nn.Module, num_ranks: int) -> None:
    for name, each in module.named_modules():
        if isinstance(each, NeedsWholeRows) and each.why_whole_rows is not None:
            raise UserError(
                f"{name or 'the module'}, a {type(each).__name__}, {each.why_whole_rows}, and {num_ranks} "
                "context-parallel ranks share each row out; expected one. Change that, or use other parallelism."
            )
