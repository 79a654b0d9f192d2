"""Context parallelism of a module by replacement of its attention functions."""

from typing import Literal, Protocol, cast, runtime_checkable

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from d9d_dist.collectives._mesh_axes import only_axis
from d9d_dist.context_parallel.all_gather import AllGatherAttention
from d9d_dist.context_parallel.all_to_all import AllToAllAttention
from d9d_dist.context_parallel.attention import Attention, DeclaresCausality, is_standard_sdpa
from d9d_dist.context_parallel.ring import RingAttention
from d9d_dist.errors import UserError

_CONVOLUTIONS = (nn.Conv1d, nn.ConvTranspose1d, nn.MaxPool1d, nn.AvgPool1d)
_SEQUENTIAL = (nn.RNNBase, nn.MultiheadAttention, nn.AdaptiveAvgPool1d, nn.AdaptiveMaxPool1d)

ContextMethod = Literal["all_gather", "all_to_all", "ring"]


@runtime_checkable
class HasAttention(Protocol):
    """Module whose attention function, `attention_function`, can be replaced."""

    attention_function: Attention


@runtime_checkable
class HasContextMesh(Protocol):
    """Module that exchanges data with the ranks that hold the other parts of a row, such as a recurrent layer.

    `parallelize_context` sets `context_mesh`, the one-axis mesh over which rows are split; `None` if rows are whole.
    """

    context_mesh: DeviceMesh | None


@runtime_checkable
class RequiresFullSequence(Protocol):
    """Module that needs all positions of a sequence, and so does not support context parallelism.

    `full_sequence_reason` follows the module's name in an error message, for example "pools whole sequences". It is
    `None` if the module, as configured, supports context parallelism.
    """

    @property
    def full_sequence_reason(self) -> str | None: ...  # noqa: D102  (see the class)


def context_parallel_attention(attention: Attention, mesh: DeviceMesh, *, method: ContextMethod) -> Attention:
    """Return the context-parallel form of an attention function, on this rank's shard of each sequence.

    If the mesh has one rank, the function is returned unchanged.

    Args:
        attention: Attention function over full sequences.
        mesh: One-axis mesh whose ranks share each sequence (`ContextSplit`), e.g. `ctx.mesh_for("batch")["cp"]`.
        method: `"all_gather"` supports any causal function and any number of heads. `"all_to_all"` supports any
            function and sends less data if there are few query heads per key/value head. `"ring"` never holds a full
            sequence. It uses its own kernels, so the function must be `sdpa_attention` or declare that it computes the
            same (`DeclaresStandardSdpa`).

    Raises:
        UserError: If the mesh does not have exactly one axis, the function is already context parallel, or the method
            is unknown. If the method is `"all_gather"` and the function is not causal (`DeclaresCausality`), or the
            method is `"ring"` and the function does not compute the same as `sdpa_attention`.
    """
    only_axis(mesh, example="cp")
    if isinstance(attention, AllGatherAttention | AllToAllAttention | RingAttention):
        raise UserError(
            f"got the attention function {type(attention).__name__}, which is already context parallel; expected one "
            "for full sequences. Apply context parallelism once."
        )
    if mesh.size() == 1:
        return attention
    match method:
        case "all_gather":
            if isinstance(attention, DeclaresCausality) and not attention.is_causal:
                raise UserError(
                    f"got the bidirectional attention function {attention!r} with method = 'all_gather'; expected "
                    "causal attention, because each rank attends only to earlier positions. Use 'all_to_all'."
                )
            return AllGatherAttention(attention, mesh)
        case "all_to_all":
            return AllToAllAttention(attention, mesh)
        case "ring":
            if not is_standard_sdpa(attention):
                raise UserError(
                    f"got the attention function {attention!r} with method = 'ring'; expected sdpa_attention or one "
                    "whose is_standard_sdpa is true, because the ring uses its own kernels. Use 'all_gather' or "
                    "'all_to_all' for other functions."
                )
            return RingAttention(mesh)
        case _:
            raise UserError(f"got method = {method!r}; expected 'all_gather', 'all_to_all' or 'ring'.")


def parallelize_context(module: nn.Module, mesh: DeviceMesh, *, method: ContextMethod = "all_gather") -> None:
    """Split the positions of every row over the ranks of a mesh axis, in place; see `context_parallel_attention`.

    Replaces the attention function of every `HasAttention` submodule, and sets the mesh of every `HasContextMesh`
    submodule. All other modules must act on single positions; they are not changed. Layers of torch that do not, such
    as convolutions and recurrent layers, are errors, unless they are in a `HasContextMesh`. If a part of the model gets
    whole rows, such as a tower of images, pass only the rest. Split batches by
    `ContextSplit.split`; for batches without position ids use `ContextSplit.positions`. Ranks compute different tokens
    with equal parameters, so gradients must be summed over this axis too: use `dp_cp_shard` and `cp_replicate` of the
    dense mesh for data parallelism. Call this function before compiling. The mesh has one axis, e.g.
    `ctx.mesh_for("batch")["cp"]`; if it has one rank, nothing is changed.

    Raises:
        UserError: If no submodule is a `HasAttention`, `HasContextMesh` or `RequiresFullSequence`. If a submodule is
            already context parallel, or its attention function is a module. If the mesh has several ranks and a
            submodule is a `RequiresFullSequence` with a reason, or a layer of torch that combines positions. If
            `context_parallel_attention` rejects the mesh or method. After an error, no attention function has been
            replaced.
    """
    only_axis(mesh, example="cp")
    if mesh.size() > 1:
        _check_supports_sequence_sharding(module, mesh.size())
    # From Python 3.12 on, isinstance with a protocol does not find attributes that are submodules; hasattr does.
    having = {name: each for name, each in module.named_modules() if hasattr(each, "attention_function")}
    found = cast("dict[str, HasAttention]", having)
    stateful = [each for each in module.modules() if isinstance(each, HasContextMesh)]
    if not found and not stateful and not any(isinstance(each, RequiresFullSequence) for each in module.modules()):
        raise UserError(
            f"no submodule of {type(module).__name__} is a HasAttention; expected at least one, with the "
            "attribute attention_function. Add it to your attention module, for example sdpa_attention."
        )
    for name, each in found.items():
        if isinstance(each.attention_function, nn.Module):
            raise UserError(
                f"the attention_function of {name or 'the module'} is the module "
                f"{type(each.attention_function).__name__}; expected a function, because replacing a module would lose "
                "its parameters."
            )
    forms = [context_parallel_attention(each.attention_function, mesh, method=method) for each in found.values()]
    for each, form in zip(found.values(), forms, strict=True):
        each.attention_function = form
    for each in stateful:
        each.context_mesh = mesh if mesh.size() > 1 else None


def _check_supports_sequence_sharding(module: nn.Module, num_ranks: int) -> None:
    exchanging = {part for each in module.modules() if isinstance(each, HasContextMesh) for part in each.modules()}
    for name, each in module.named_modules():
        reason, remedy = each.full_sequence_reason if isinstance(each, RequiresFullSequence) else None, ""
        if reason is None and each not in exchanging and _combines_positions(each):
            reason = "combines positions"
            remedy = (
                " Or pass only the part of the model that gets parts of rows, such as the decoder behind a tower, or "
                "exchange positions in a module with the attribute context_mesh."
            )
        if reason is not None:
            raise UserError(
                f"{name or 'the module'}, a {type(each).__name__}, {reason}, but {num_ranks} context-parallel ranks "
                "shard each sequence; expected one context-parallel rank. Set the degree to 1, or shard the model on "
                f"another axis.{remedy}"
            )


def _combines_positions(layer: nn.Module) -> bool:
    """Return True for a layer of torch whose output at a position depends on other positions of the row."""
    kernel = getattr(layer, "kernel_size", 1) if isinstance(layer, _CONVOLUTIONS) else 1
    return isinstance(layer, _SEQUENTIAL) or kernel not in (1, (1,))
