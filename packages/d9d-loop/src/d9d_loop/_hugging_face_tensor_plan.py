"""Tensor-parallel styles of a `transformers` model, from the plan in its `tp_plan` attribute.

The plan names styles of `transformers` for modules and parameters, with `*` for layer numbers. Activations between
modules are plain tensors in all styles, as in `d9d_dist`.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from inspect import getsource, signature
from typing import Any, ClassVar, NamedTuple, final

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.utils import _pytree as pytree

from d9d_dist import (
    ColumnParallel,
    Replicated,
    RowParallel,
    SequenceParallel,
    TensorStyle,
    UserError,
    copy_to_axis,
    gather_from_axis,
    reduce_from_axis,
    scatter_to_axis,
)
from d9d_dist.tensor_parallel.vocab import embed_vocab_shard


class TensorPlan(NamedTuple):
    """Styles of a model.

    Attributes:
        styles: The plan for `parallelize_tensor`, by full module names.
        whole: Blocks that stay replicated, each with the modules that prevent its split; `*` stands for layer numbers.
            If no layer is split, a single entry stands for all layers.
    """

    styles: dict[str, TensorStyle]
    whole: Mapping[str, Sequence[str]]


def tensor_plan(model: Any, degree: int, *, leave: Collection[str] = ()) -> TensorPlan:
    """Return the tensor-parallel plan of a model, without the modules named in `leave`.

    A block stays replicated if one of its modules has an unsupported style, or has no style and lies between split
    layers. A replicated block gives the same results, but saves no memory. Outputs of embeddings and heads are not
    sharded. Embeddings and heads also stay replicated if the degree does not divide their rows, or if they are tied to
    a replicated module.

    Raises:
        UserError: If the model has no plan.
    """
    rules: Mapping[str, str] = model.tp_plan or {}
    if not rules:
        raise UserError(
            f"mesh.tensor_parallel = {degree}, but {type(model).__name__} has no tensor-parallel plan; expected 1. "
            "Shard the model with mesh.data_parallel_shard instead, or write a ModelProvider."
        )
    plan: dict[str, TensorStyle] = {}
    unknown: dict[str, list[str]] = {}
    for name, module in model.named_modules():
        rule = rules.get(_with_wildcards(name))
        inside = {key: found for key in module._parameters if (found := rules.get(_with_wildcards(f"{name}.{key}")))}
        if name in leave or (rule is None and not inside):
            continue
        style = _style(model, name, rule, inside)
        if style is None:
            unknown[name] = [f"{_with_wildcards(f'{name}.{key}')} ({each})" for key, each in inside.items()]
            unknown[name] += [f"{_with_wildcards(name)} ({type(module).__name__}, {rule})"]
        else:
            plan[name] = style
    blocks = [(_block_of(model, name, plan), reasons) for name, reasons in unknown.items()]
    plan = _without_blocks(plan, (block for block, _ in blocks))
    unnamed = _name_inner_modules(model, plan)
    plan, whole = _without_blocks(plan, unnamed), _by_kind((*blocks, *unnamed.items()))
    if not whole and not any(style.placements() and not _has_whole_output(style) for style in plan.values()):
        whole[f"the layers of {type(model).__name__}"] = [f"a plan that names only {', '.join(rules)}"]
    for name, module in model.named_modules():
        if type(module).__name__ == "Gemma4Model" and module.config.get_text_config().hidden_size_per_layer_input:
            # The model also reads the padding token's row of this weight outside of the embedding's forward.
            plan.pop(f"{name}.language_model.embed_tokens", None)
            plan[name] = _ReadsParameters(("language_model.embed_tokens",))
        if type(module).__name__ in ("Glm4vVisionEmbeddings", "Glm4vMoeVisionEmbeddings"):
            plan[name] = _ReadsParameters(("position_embedding",))  # interpolates the weight
    return TensorPlan(_without_undivided(model, plan, degree), whole)


def _block_of(model: nn.Module, name: str, plan: Mapping[str, TensorStyle]) -> str:
    """Return the name of a module's parent if activations inside the parent are split, else the module's name."""
    around = name.rpartition(".")[0]
    styles = [plan.get(f"{around}.{child}") for child, _ in model.get_submodule(around).named_children()]
    has_split = any(
        isinstance(style, RowParallel) or (isinstance(style, ColumnParallel) and not _has_whole_output(style))
        for style in styles
    )
    return around if has_split else name


def _without_blocks(plan: Mapping[str, TensorStyle], blocks: Iterable[str]) -> dict[str, TensorStyle]:
    prefixes = tuple(f"{block}." for block in blocks)
    return {name: style for name, style in plan.items() if not f"{name}.".startswith(prefixes)}


def _by_kind(blocks: Iterable[tuple[str, Sequence[str]]]) -> dict[str, list[str]]:
    """Return the blocks with `*` for layer numbers, each with its reasons once."""
    found: dict[str, dict[str, None]] = {}
    for block, reasons in blocks:
        found.setdefault(_with_wildcards(block), {}).update(dict.fromkeys(reasons))
    return {block: list(reasons) for block, reasons in found.items()}


def _style(model: Any, name: str, rule: str | None, inside: Mapping[str, str]) -> TensorStyle | None:
    """Return the style of a module for its rule and the rules of its parameters; None if a rule is not supported."""
    module = model.get_submodule(name)
    is_linear, is_embedding = isinstance(module, nn.Linear), isinstance(module, nn.Embedding)
    style: TensorStyle | None = None
    match rule:
        case "moe_tp_experts" if inside == _SORTED_EXPERTS and _takes_sorted_tokens(module):
            style = _SplitSortedExperts(dict.fromkeys(inside, Shard(0)))
        case "moe_tp_experts" if _is_loop(module) and _computes_absent_experts(module):
            pass
        case "moe_tp_experts" if (
            inside == _SORTED_EXPERTS or model.ep_plan.get(_with_wildcards(name)) == "ep_dispatch_experts"
        ):
            style = _SplitExperts({key: Shard(0) for key, _ in module.named_parameters(recurse=False)})
        case "local_params" if set(inside.values()) <= {"colwise"}:
            style = _SplitParameters(dict.fromkeys(inside, Shard(0)))
        case "all_reduce" if set(inside.values()) == {"colwise", "rowwise"} and _is_batched(module, inside):
            style = _SplitMatrices({key: Shard(1 if each == "colwise" else 2) for key, each in inside.items()})
        case _ if inside:
            pass
        case "colwise" if is_linear:
            style = ColumnParallel(head_dim=_head_size(model, name, module.out_features))
        case "mla_kv_a_proj":
            style = _LatentProjection(model.config.get_text_config().qk_rope_head_dim)
        case "embedding_rowwise" if is_embedding and not _looks_up_rows(module):
            style = Replicated()
        case _:
            style = (_LINEAR_STYLES if is_linear else _EMBEDDING_STYLES if is_embedding else _OTHER_STYLES).get(rule)
    return style


def _with_wildcards(name: str) -> str:
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))


def _head_size(model: Any, name: str, num_outputs: int) -> int:
    """Return the number of consecutive outputs per attention head of a layer; 1 outside of attention.

    The key and value projections may have fewer heads than the query projection. A fused projection has the queries,
    keys and values of each head.
    """
    attention = model.get_submodule(name.rpartition(".")[0])
    sizes = [getattr(attention, key) for key in ("head_dim", "head_size", "qk_head_dim") if hasattr(attention, key)]
    if not sizes:
        return 1
    config = getattr(attention, "config", model.config.get_text_config())
    num_heads = config.num_attention_heads
    is_whole = num_outputs >= num_heads * sizes[0] and num_outputs % num_heads == 0
    return num_outputs // num_heads if is_whole else sizes[0]


def _name_inner_modules(model: Any, plan: dict[str, TensorStyle]) -> dict[str, list[str]]:
    """Add styles that are missing in the model's plan; return the modules and parameters without a style, by block.

    A module between split layers has partial gradients, so without a style its gradients would be wrong. Latent
    attention is not examined: its replicated modules come before the split layers.
    """
    unknown: dict[str, list[str]] = {}
    for name, module in model.named_modules():
        children = {child: f"{name}.{child}" for child, _ in module.named_children()}
        styles = [plan.get(full_name) for full_name in children.values()]
        is_split = any(isinstance(style, ColumnParallel) and not _has_whole_output(style) for style in styles)
        if not is_split or any(isinstance(style, _LatentProjection) for style in styles):
            if name not in plan and any(isinstance(child, nn.Conv1d) for child in module.children()):
                plan[name] = _ReadsParameters(tuple(children))
            continue
        found = []
        if name not in plan:
            found = [
                f"{_with_wildcards(f'{name}.{key}')} (no style)" for key, _ in module.named_parameters(recurse=False)
            ]
        for child, full_name in children.items():
            inner = getattr(module, child)
            shapes = {tuple(parameter.shape) for parameter in inner.parameters()}
            if not shapes or any(f"{other}.".startswith(f"{full_name}.") for other in plan):
                continue
            if child == "act_fn" or (child in ("q_norm", "k_norm") and shapes == {(module.head_dim,)}):
                plan[full_name] = SequenceParallel()
            else:
                found.append(f"{_with_wildcards(full_name)} ({type(inner).__name__}, no style)")
        if found:
            unknown[name] = found
    return unknown


def _takes_sorted_tokens(experts: nn.Module) -> bool:
    """Return True if the forward takes only tokens. Other forwards also take the chosen experts and their weights."""
    return len(signature(type(experts).forward).parameters) == 2  # self and the tokens


def _is_loop(experts: nn.Module) -> bool:
    return getattr(getattr(experts, "config", None), "_experts_implementation", "eager") == "eager"


def _computes_absent_experts(experts: nn.Module) -> bool:
    """Return True if the loop over experts does not skip index `num_experts`, which marks tokens for other ranks."""
    source = getsource(type(experts))
    return "self.num_experts + 1" in source and "== self.num_experts:" not in source


def _is_batched(module: nn.Module, names: Iterable[str]) -> bool:
    """Return True if all parameters of a module are matrices with one batch dim."""
    return set(names) == module._parameters.keys() and all(each.ndim == 3 for each in module.parameters(recurse=False))


def _looks_up_rows(embedding: Any) -> bool:
    """Return True if an embedding only looks up its rows and scales them."""
    return type(embedding).forward is nn.Embedding.forward or hasattr(embedding, "embed_scale")


def _without_undivided(model: nn.Module, plan: Mapping[str, TensorStyle], degree: int) -> dict[str, TensorStyle]:
    """Return the plan without embeddings and heads that cannot be split, or are tied to modules that are not split."""
    holders: dict[nn.Parameter, list[str]] = {}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            holders.setdefault(parameter, []).append(name)
    whole = {
        name
        for parameter, names in holders.items()
        if parameter.shape[:1]
        and (parameter.shape[0] % degree or not all(_has_whole_output(plan.get(name)) for name in names))
        for name in names
    }
    return {name: style for name, style in plan.items() if name not in whole or not _has_whole_output(style)}


def _has_whole_output(style: TensorStyle | None) -> bool:
    return isinstance(style, _SplitEmbedding) or (isinstance(style, ColumnParallel) and style.output == Replicate())


@dataclass(frozen=True)
class _Split(TensorStyle):
    """Module whose own parameters are split. `by_name` has their placements."""

    by_name: Mapping[str, Placement]

    def placements(self) -> Mapping[str, Placement]:
        return self.by_name


@final
@dataclass(frozen=True)
class _SplitInput(TensorStyle):
    """`RowParallel` linear layer whose input is equal on all ranks."""

    def placements(self) -> Mapping[str, Placement]:
        return RowParallel().placements()

    def forward(self, module: nn.Module, mesh: DeviceMesh, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return RowParallel().forward(module, mesh, inner, scatter_to_axis(args[0], mesh, dim=-1))


@final
@dataclass(frozen=True)
class _SplitEmbedding(_Split):
    """Embedding with split rows, and optionally a padding index and scaled rows."""

    def prepare(self, module: nn.Module, mesh: DeviceMesh) -> None:
        assert isinstance(module, nn.Embedding)
        if module.padding_idx is not None:
            num_rows = module.num_embeddings // mesh.size()
            local = module.padding_idx - mesh.get_local_rank() * num_rows
            module.padding_idx = local if 0 <= local < num_rows else None

    def forward(self, module: nn.Module, mesh: DeviceMesh, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        (ids,) = args
        assert isinstance(module, nn.Embedding)
        return reduce_from_axis(embed_vocab_shard(ids, module.num_embeddings // mesh.size(), mesh, inner), mesh)


@final
@dataclass(frozen=True)
class _LatentProjection(TensorStyle):
    """Replicated layer of latent attention. The last `num_shared` features of its output are keys that all heads share.

    The other features go through column-parallel layers, which sum the gradients of their inputs.
    """

    has_partial_gradients: ClassVar[bool] = False
    num_shared: int

    def forward(self, module: nn.Module, mesh: DeviceMesh, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        features = inner(*args, **kwargs)
        latent, shared = features.split([features.shape[-1] - self.num_shared, self.num_shared], dim=-1)
        return torch.cat([latent, copy_to_axis(shared, mesh)], dim=-1)


@final
@dataclass(frozen=True)
class _SplitParameters(_Split):
    """Module whose own parameters are split, and whose submodules have their own styles."""

    has_partial_gradients: ClassVar[bool] = False


@final
@dataclass(frozen=True)
class _ReadsParameters(TensorStyle):
    """Replicated module that reads the parameters of submodules (`names`), such as those of a causal convolution."""

    has_partial_gradients: ClassVar[bool] = False
    names: tuple[str, ...]

    def forward(self, module: nn.Module, mesh: DeviceMesh, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        before = [(child, dict(child._parameters)) for child in map(module.get_submodule, self.names)]
        for child, parameters in before:
            for name, parameter in parameters.items():
                if isinstance(parameter, DTensor) and all(
                    placement.is_replicate() for placement in parameter.placements
                ):
                    local = parameter.to_local(grad_placements=parameter.placements)
                    child._parameters[name] = local  # ty: ignore[invalid-assignment]  (forward only reads it)
        try:
            return inner(*args, **kwargs)
        finally:
            for child, parameters in before:
                child._parameters.update(parameters)


@final
@dataclass(frozen=True)
class _SplitExperts(_Split):
    """Experts distributed over ranks. Each rank computes its own experts for all tokens; the outputs are summed.

    The plan of `transformers` splits each expert instead, which needs a strided split of fused gates and projections.
    This style relies on a property of expert parallelism in `transformers`: experts skip tokens with the expert index
    `num_experts`. Dim 0 of the parameters is the expert dim.
    """

    def prepare(self, module: Any, mesh: DeviceMesh) -> None:
        module.num_experts //= mesh.size()
        module._is_expert_parallel = True

    def forward(self, module: Any, mesh: DeviceMesh, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        x, expert_ids, weights, *rest = args
        x, weights = copy_to_axis(x, mesh), copy_to_axis(weights, mesh)
        local = expert_ids - mesh.get_local_rank() * module.num_experts
        is_away = (local < 0) | (local >= module.num_experts)
        local, weights = local.masked_fill(is_away, module.num_experts), weights.masked_fill(is_away, 0.0)
        output = inner(x, local, weights, *rest, **kwargs)
        # Adding zero lets backward reach the collectives of copy_to_axis on ranks whose experts get no tokens. The loop
        # over experts ("eager") must also give their parameters gradients of zero, as in a job of one process.
        used = (x, weights, *(getattr(module, name) for name in self.by_name if _is_loop(module)))
        return reduce_from_axis(sum((tensor[:0].sum() for tensor in used), output), mesh)


_SORTED_EXPERTS = {"gate_up_proj": "packed_rowwise", "down_proj": "colwise"}
"""Styles in the plan of `transformers` for the parameters of experts whose input is sorted by expert, as in Llama 4."""


@final
@dataclass(frozen=True)
class _SplitSortedExperts(_Split):
    """Experts distributed over ranks, for an input [num_experts * num_tokens, hidden] that is sorted by expert."""

    def forward(self, module: nn.Module, mesh: DeviceMesh, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        output = inner(scatter_to_axis(args[0], mesh, dim=0), *args[1:], **kwargs)
        return gather_from_axis(output, mesh, dim=0, gradient="equal")


@final
@dataclass(frozen=True)
class _SplitMatrices(_Split):
    """Module of batched matrices, split by outputs or inputs, whose result is a sum over the split features."""

    def forward(self, module: nn.Module, mesh: DeviceMesh, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        inputs, options = pytree.tree_map_only(torch.Tensor, lambda x: copy_to_axis(x, mesh), (args, kwargs))
        return reduce_from_axis(inner(*inputs, **options), mesh)


_LINEAR_STYLES: Mapping[str | None, TensorStyle] = {
    "colwise_gather_output": ColumnParallel(output=Replicate()),
    "colwise_rep": ColumnParallel(output=Replicate()),
    "rowwise": RowParallel(),
    "rowwise_split_input": _SplitInput(),
    "rowwise_rep": _SplitInput(),
    "replicate": Replicated(),
}
_EMBEDDING_STYLES: Mapping[str | None, TensorStyle] = {
    "embedding_rowwise": _SplitEmbedding({"weight": Shard(0)}),
    "replicate": Replicated(),
}
_OTHER_STYLES: Mapping[str | None, TensorStyle] = {
    "replicated_with_grad_allreduce": SequenceParallel(),
    "replicate": Replicated(),
}
