"""Tensor-parallel styles of a `transformers` model, from the plan in its `tp_plan` attribute.

The plan names styles of `transformers` for modules and parameters, with `*` for layer numbers. Activations between
modules are plain tensors in all styles, as in `d9d_dist`.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from inspect import signature
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
        UserError: If the model has no plan, or a module of `UNSPLIT`.
    """
    rules: Mapping[str, str] = model.tp_plan or {}
    if not rules:
        raise UserError(
            f"mesh.tensor_parallel = {degree}, but {type(model).__name__} has no tensor-parallel plan; expected 1. "
            "Shard the model with mesh.data_parallel_shard instead, or write a ModelProvider."
        )
    if unsplit := UNSPLIT & {type(each).__name__ for each in model.modules()}:
        raise UserError(
            f"mesh.tensor_parallel = {degree}, but {type(model).__name__} has {', '.join(unsplit)}, which computes "
            "with weights outside of the forward of a module; expected 1. Shard the model with "
            "mesh.data_parallel_shard instead."
        )
    plan: dict[str, TensorStyle] = {}
    unknown: dict[str, list[str]] = {}
    for name, module in model.named_modules():
        rule = rules.get(_with_wildcards(name))
        inside = {key: found for key in module._parameters if (found := rules.get(_with_wildcards(f"{name}.{key}")))}
        if name in leave or (rule is None and not inside):
            continue
        site = _Site(model, name, module, inside)
        style = next((make(site) for names, fits, make in STYLES if rule in names and fits(site)), None)
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
        key, inner = READERS.get(type(module).__name__, ("", ""))
        if inner and (not key or getattr(module.config.get_text_config(), key)):
            plan.pop(f"{name}.{inner}", None)
            plan[name] = _ReadsParameters((inner,))
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


def _with_wildcards(name: str) -> str:
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))


def _head_size(site: "_Site") -> int:
    """Return the number of consecutive outputs per attention head of a layer; 1 outside of attention.

    The key and value projections may have fewer heads than the query projection. A fused projection has the queries,
    keys and values of each head.
    """
    attention, num_outputs = site.model.get_submodule(site.name.rpartition(".")[0]), site.module.out_features
    sizes = [getattr(attention, key) for key in ("head_dim", "head_size", "qk_head_dim") if hasattr(attention, key)]
    if not sizes:
        return 1
    config = getattr(attention, "config", site.model.config.get_text_config())
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


def _is_loop(experts: nn.Module) -> bool:
    return getattr(getattr(experts, "config", None), "_experts_implementation", "eager") == "eager"


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


class _Site(NamedTuple):
    """Module of a model with a rule of the plan. `inside` has the rules of its own parameters."""

    model: Any
    name: str
    module: Any
    inside: Mapping[str, str]


_SORTED_EXPERTS = {"gate_up_proj": "packed_rowwise", "down_proj": "colwise"}
"""Rules of the parameters of experts whose input is sorted by expert, as in Llama 4."""


def _takes_sorted_tokens(site: _Site) -> bool:
    """Return True if the forward takes only tokens. Other forwards also take the chosen experts and their weights."""
    return site.inside == _SORTED_EXPERTS and len(signature(type(site.module).forward).parameters) == 2  # self, tokens


def _skips_absent_experts(site: _Site) -> bool:
    """Return True for experts that skip index `num_experts`, which marks the tokens of experts on other ranks.

    A loop over experts is tried: without experts, it must take such a token.
    """
    if site.inside != _SORTED_EXPERTS and site.model.ep_plan.get(_with_wildcards(site.name)) != "ep_dispatch_experts":
        return False
    if not _is_loop(site.module):
        return True
    experts, on_cpu = copy(site.module), partial(torch.zeros, dtype=torch.float32, device="cpu")
    try:
        width = experts.down_proj.shape[2 if getattr(experts, "is_transposed", False) else 1]
        parameters = experts.named_parameters(recurse=False)
        vars(experts)["_parameters"] = {key: on_cpu(0, *each.shape[1:]) for key, each in parameters}
        experts.num_experts = 0
        experts(on_cpu(1, width), on_cpu(1, 1).long(), on_cpu(1, 1))
    except Exception:
        return False
    return True


def _has_matrices(site: _Site) -> bool:
    """Return True if all parameters of a module are matrices with one batch dim, split by outputs and by inputs."""
    own = dict(site.module.named_parameters(recurse=False))
    is_batched = site.inside.keys() == own.keys() and all(each.ndim == 3 for each in own.values())
    return is_batched and set(site.inside.values()) == {"colwise", "rowwise"}


def _shards(rules: Mapping[str, Any], dim: int = 0) -> dict[str, Placement]:
    return {key: Shard(dim + (rule == "rowwise")) for key, rule in rules.items()}


def _is_whole(site: _Site) -> bool:
    return not site.inside


def _is_linear(site: _Site) -> bool:
    return not site.inside and isinstance(site.module, nn.Linear)


def _is_embedding(site: _Site) -> bool:
    return not site.inside and isinstance(site.module, nn.Embedding)


def _looks_up_rows(site: _Site) -> bool:
    """Return True for an embedding that only looks up its rows and scales them."""
    is_plain = type(site.module).forward is nn.Embedding.forward or hasattr(site.module, "embed_scale")
    return _is_embedding(site) and is_plain


STYLES: Sequence[tuple[Collection[str], Callable[[_Site], bool], Callable[[_Site], TensorStyle]]] = (
    (["moe_tp_experts"], _takes_sorted_tokens, lambda site: _SplitSortedExperts(_shards(site.inside))),
    (
        ["moe_tp_experts"],
        _skips_absent_experts,
        lambda site: _SplitExperts(_shards(dict(site.module.named_parameters(recurse=False)))),
    ),
    (
        ["local_params"],
        lambda site: set(site.inside.values()) <= {"colwise"},
        lambda site: _SplitParameters(_shards(site.inside)),
    ),
    (["all_reduce"], _has_matrices, lambda site: _SplitMatrices(_shards(site.inside, 1))),
    (
        ["mla_kv_a_proj"],
        _is_whole,
        lambda site: _LatentProjection(site.model.config.get_text_config().qk_rope_head_dim),
    ),
    (["colwise"], _is_linear, lambda site: ColumnParallel(head_dim=_head_size(site))),
    (["colwise_gather_output", "colwise_rep"], _is_linear, lambda site: ColumnParallel(output=Replicate())),
    (["rowwise"], _is_linear, lambda site: RowParallel()),
    (["rowwise_split_input", "rowwise_rep"], _is_linear, lambda site: _SplitInput()),
    (["embedding_rowwise"], _looks_up_rows, lambda site: _SplitEmbedding({"weight": Shard(0)})),
    (["embedding_rowwise"], _is_embedding, lambda site: Replicated()),
    (
        ["replicated_with_grad_allreduce"],
        lambda site: _is_whole(site) and not (_is_linear(site) or _is_embedding(site)),
        lambda site: SequenceParallel(),
    ),
    (["replicate"], _is_whole, lambda site: Replicated()),
)
"""Rules of `transformers`, the modules that they may name, and their styles. The first row that fits is used."""

READERS: Mapping[str, tuple[str, str]] = {
    "Gemma4Model": ("hidden_size_per_layer_input", "language_model.embed_tokens"),
    "Glm4vVisionEmbeddings": ("", "position_embedding"),  # interpolates the weight
    "Glm4vMoeVisionEmbeddings": ("", "position_embedding"),
    "LongcatFlashTopkRouter": ("", "classifier"),
}
"""Classes that read weights of a submodule outside of its forward: a key of the text that is not 0, and the name."""

UNSPLIT = frozenset(("Gemma3nTextAltUp",))
"""Classes that read weights in methods that are not their forward."""
