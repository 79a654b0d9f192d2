"""Context parallelism of a `transformers` model.

The code before the first block runs on whole rows, with the token ids of all ranks: positions, masks, rotary tables and
packed documents are those of one process. At the first block a rank takes its part of the rows. Attention gathers keys
and values, and computes its rows of the mask with the model's own attention function. Modules of blocks that combine
positions in another way compute whole rows on each rank, of which the loss uses this rank's part.
"""

from functools import partial
from inspect import signature
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from d9d_dist import ContextSplit, UserError, sdpa_attention
from d9d_dist.context_parallel.all_gather import AllGatherAttention
from d9d_loop.model._block_trace import tensors_in
from d9d_loop.model._context_trace import Dims, trace_context, with_value

IMAGE_MODELS = frozenset((
    *("gemma3", "glm4v", "glm4v_moe", "idefics3", "internvl", "llava_onevision", "mistral3", "qwen2_5_vl", "qwen3_vl"),
    *("qwen3_vl_moe", "smolvlm"),
))  # fmt: skip
"""Values of `model_type` whose parts of rows, and samples of a packed row, are compared with single samples."""

_OF_WHOLE_ROWS = {"labels", "logits_to_keep", "start_positions", "end_positions", "cache_position", "past_key_values"}


def split_rows(model: Any, whole: Any, mesh: DeviceMesh) -> dict[str, str]:
    """Make a model, or a stage of it, take and return this rank's part of rows split by `ContextSplit`, in place.

    `whole` is the whole model, which may be on `meta`. Return the modules that compute whole rows, with the reason.

    Raises:
        UserError: If code outside of modules of blocks combines positions, or the attention is neither "sdpa" nor
            "eager".
    """
    chosen = model.config.get_text_config()._attn_implementation
    if chosen not in ("sdpa", "eager"):
        raise UserError(
            f"the model has attn_implementation = {chosen!r} on several context-parallel ranks; expected 'sdpa' or "
            "'eager'. Pass attn_implementation='sdpa' to hugging_face_model."
        )
    trace = trace_context(whole)
    split = ContextSplit(mesh)
    attention, parts = _ContextAttention(split), _Parts(split)
    blocks = model.get_submodule(trace.blocks)
    for name, module in model.named_modules():
        if name in trace.attention:
            vars(module)["context_attention"] = attention
        if (rows := trace.whole.get(name)) is None:
            continue
        if f"{trace.blocks}.".startswith(f"{name}."):
            blocks[-1].register_forward_hook(partial(parts.gather_output, rows.inputs))
        else:
            module.register_forward_pre_hook(partial(parts.gather, rows.inputs), with_kwargs=True)
        module.register_forward_hook(partial(parts.split_output, rows.outputs))
    for module in model.modules():
        if "deepstack_visual_embeds" in signature(module.forward).parameters:
            module.register_forward_pre_hook(parts.split_features, with_kwargs=True, prepend=True)
    for splits, block in zip(trace.splits, blocks, strict=False):  # the planner drops repeated blocks
        block.register_forward_pre_hook(partial(parts.split, splits), with_kwargs=True)
    model.forward = _RowsForward(model, split, parts)
    return {name: rows.reason for name, rows in trace.whole.items()}


@final
class _ContextAttention:
    """Attention of this rank's queries to the keys of whole rows."""

    def __init__(self, split: ContextSplit) -> None:
        self._split, self._causal = split, AllGatherAttention(sdpa_attention, split.mesh)

    def __call__(  # noqa: PLR0917 - as transformers calls it
        self,
        attend: Any,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        **options: Any,
    ) -> Any:
        is_causal = options.get("is_causal")
        is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        # The eager functions have no mask of their own.
        if attention_mask is None and is_causal and attend.__name__ == "sdpa_attention_forward":
            if not options.get("dropout"):
                return self._attend_causally(query, key, value, options.get("scaling")), None
            positions = self._split.positions(query.shape[2] * self._split.mesh.size())
            keys = torch.arange(positions.shape[1] * self._split.mesh.size(), device=query.device)
            attention_mask = (positions[0, :, None] >= keys)[None, None]
        key, value = self._split.join((key, value), dim=2, gradient="partial")
        return attend(module, query, key, value, attention_mask, **options)

    def _attend_causally(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """Compute causal attention without a mask. `sdpa_attention` scales by the width of keys and values."""
        width, values = query.shape[-1], value.shape[-1]
        widest = max(width, values)
        if scale is not None and scale != widest**-0.5:
            query = query * (scale * widest**0.5)
        elif scale is None and widest != width:
            query = query * (widest / width) ** 0.5
        padded = (F.pad(each, (0, widest - each.shape[-1])) for each in (query, key, value))
        return self._causal(*(each.transpose(1, 2) for each in padded))[..., :values]


@final
class _Parts:
    """This rank's parts of the arguments of blocks. Blocks share masks and rotary tables."""

    def __init__(self, split: ContextSplit) -> None:
        self._split, self.whole_length = split, 0
        self._parts: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def clear(self) -> None:
        """Forget the parts of a forward."""
        self._parts = {}

    def split(self, dims: Dims, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Return the arguments of a block, split at the dims of its trace."""
        return self._map(self._part, dims, (args, kwargs), self.whole_length)

    def split_features(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Return the arguments of a decoder that adds image features to its hidden states, for this rank's tokens."""
        if (features := kwargs.get("deepstack_visual_embeds")) is None:
            return args, kwargs
        is_image = kwargs["visual_pos_masks"]
        own = self._split.split(is_image)
        indices = self._split.split(is_image.flatten().cumsum(0).view_as(is_image) - 1)[own]
        kwargs["deepstack_visual_embeds"] = [each[indices] for each in features]
        return args, {**kwargs, "visual_pos_masks": own}

    def split_output(self, dims: Dims, module: nn.Module, args: Any, output: Any) -> Any:
        """Return this rank's part of the output of a module that computes whole rows."""
        return self._map(self._split.split, dims, output, self.whole_length)

    def gather(self, dims: Dims, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Return the arguments of a module that computes whole rows, gathered from all context-parallel ranks."""
        return self.gather_output(dims, module, args, (args, kwargs))

    def gather_output(self, dims: Dims, module: nn.Module, args: Any, output: Any) -> Any:
        """Return the output of the last block, with rows gathered from all context-parallel ranks."""
        join = partial(self._split.join, gradient="partial")
        return self._map(join, dims, output, self.whole_length // self._split.mesh.size())

    def _map(self, function: Any, dims: Dims, tree: Any, length: int) -> Any:
        for path, tensor in list(tensors_in(tree)):
            # The trace ran without a padding mask, which is [B, H, queries, keys] or [B, positions].
            is_mask = path not in dims and tensor.shape[-1] == (self.whole_length if tensor.dim() == 4 else length)
            unseen = {4: 2, 2: 1}.get(tensor.dim()) if is_mask else None
            dim = dims.get(path, unseen)
            if dim is not None and tensor.shape[dim] != 1:
                tree = with_value(tree, path, function(tensor, dim=dim))
        return tree

    def _part(self, tensor: Tensor, dim: int) -> Tensor:
        key = (id(tensor), dim)
        if key not in self._parts:
            self._parts[key] = (tensor, self._split.split(tensor, dim=dim))
        return self._parts[key][1]


def _parameters(model: Any, method: str) -> frozenset[str]:
    """Return the names of the parameters of a method of the model without head; none without the method."""
    found = getattr(model.base_model, method, None)
    return frozenset(() if found is None else signature(found).parameters)


@final
class _RowsForward:
    """Forward that gathers the rows of the inputs."""

    def __init__(self, model: Any, split: ContextSplit, parts: _Parts) -> None:
        self._forward, self._split, self._parts = model.forward, split, parts
        self._name, self._model_name = model.main_input_name, type(model).__name__
        self._model_type: str = model.config.model_type
        of_image, *others = (_parameters(model, f"get_{kind}_features") for kind in ("image", "video", "audio"))
        self._of_images = of_image | {"pixel_values"}
        self._not_joined = self._of_images | {"logits_to_keep"}  # positions in the rank's part
        self._not_compared = frozenset().union(*others) - self._of_images - {"attention_mask"}
        if self._model_type not in IMAGE_MODELS:
            self._not_compared |= self._of_images

    def __call__(self, *first: Any, **shared: Any) -> Any:
        if self._name not in shared:
            raise UserError(
                f"got no keyword argument {self._name} on several context-parallel ranks; expected the tokens of this "
                f"rank. Return {{{self._name!r}: ...}} from the task's inputs."
            )
        for name in _OF_WHOLE_ROWS & shared.keys():
            value = shared[name]
            is_all = name == "logits_to_keep" and not isinstance(value, Tensor) and value == 0
            is_of_part = name == "logits_to_keep" and isinstance(value, Tensor) and value.dim() > 1  # positions [B, K]
            if value is not None and not is_all and not is_of_part:
                raise UserError(
                    f"got {name} for {self._model_name} on several context-parallel ranks, which reads it for a rank's "
                    "part of a row; expected arguments that are shifted and split in the task. Compute the loss in the "
                    f"task, and remove {name} from its inputs."
                )
        if found := sorted(self._not_compared & {name for name, value in shared.items() if value is not None}):
            raise UserError(
                f"got {found[0]} for {self._model_name} on several context-parallel ranks; expected texts only, or "
                f"images for one of {', '.join(sorted(IMAGE_MODELS))}. Set mesh.context_parallel_shard to 1."
            )
        shape = shared[self._name].shape[:2]
        shared = {
            key: self._split.join(value, dim=dim, gradient="partial")
            if isinstance(value, Tensor)
            and key not in self._not_joined
            and value.dim() > 1
            and value.shape[dim := -1 if key == "position_ids" else 1] == shape[1]
            else value
            for key, value in shared.items()
        }
        self._parts.whole_length = shape[1] * self._split.mesh.size()
        try:
            return self._forward(*first, **shared)
        finally:
            self._parts.clear()
