"""Pipeline stages of a `transformers` model.

A stage is the whole model without the parameters of the other stages. A cut is the call of a stage's first block: the
stage before it runs the model's forward up to this call and sends the tensors that the block receives. The next stage
also runs the forward, for masks, positions and rotary tables. Absent layers return zeros, and absent blocks return
their input. At the cut the received tensors replace the arguments of the block. So code outside of the blocks, such as
the scale of an embedding, acts on the hidden states of exactly one stage.

Image features that a decoder adds after blocks of later stages (DeepStack) follow the tensors of a cut, as
[B, L, H] with zeros at tokens of texts. A decoder adds received features at all tokens.
"""

from collections.abc import Mapping
from inspect import signature
from itertools import chain
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from d9d_dist import StageInfo, UserError
from d9d_loop.model._block_trace import BlockTrace, Hidden, Path
from d9d_loop.model._context_trace import with_value

_OWN = frozenset(vars(nn.Module()))


def cut_stage(model: Any, trace: BlockTrace, stage: StageInfo, *, virtual_layers: int = 0) -> None:
    """Turn a whole model into one stage of it, in place; the first one has as many blocks fewer as `virtual_layers`.

    The stage's forward takes what the previous stage returned as its only positional argument, and returns what the
    next stage receives; the last stage returns the model's outputs.

    Raises:
        UserError: If there are fewer blocks than stages, or what crosses a cut cannot be sent.
    """
    flow = _Flow(trace, stage, virtual_layers)
    names = {parameter: name for name, parameter in model.named_parameters()}
    blocks: Any = model.get_submodule(trace.blocks)
    in_blocks = {parameter for block in blocks for parameter in block.parameters()}
    kept = {parameter for index in flow.own for parameter in blocks[index].parameters()}
    tower = _tower(model, trace, names)
    for parameter, name in names.items():
        unused = {0} if name in tower else {trace.num_blocks}
        uses = trace.uses.get(name, set() if parameter in in_blocks else unused)
        if any(map(flow.is_real, uses)):
            kept.add(parameter)
    _remove_layers(model, flow, kept)
    for index, block in enumerate(blocks):
        if index not in flow.own:
            blocks[index] = _AbsentBlock(block, index, flow)
        elif flow.receives(index):
            # FSDP and checkpointing change `forward`; the arguments are replaced around both.
            block.__class__ = type(type(block).__name__, (_Entry, type(block)), {})
            block.stage_entry = (index, flow)
    for parameter in kept:
        _register(model, names[parameter], parameter)
    _keep_buffers_once(model, trace, stage)
    decoder = model.get_submodule(trace.blocks.rpartition(".")[0])
    if "deepstack_visual_embeds" in signature(decoder.forward).parameters:
        decoder.register_forward_pre_hook(flow.exchange_features, with_kwargs=True)
    model.forward = _StageForward(model, flow)


def _tower(model: Any, trace: BlockTrace, names: Mapping[nn.Parameter, str]) -> set[str]:
    """Return the parameters that compute features of images: those of the base model that a text does not use."""
    if not hasattr(model.base_model, "get_image_features"):
        return set()
    return {names[each] for each in model.base_model.parameters() if names[each] not in trace.uses}


def _remove_layers(model: Any, flow: "_Flow", kept: set[nn.Parameter]) -> None:
    """Remove layers and parameters outside of the blocks that the stage does not keep."""
    trace = flow.trace
    first_names = {module: name for name, module in reversed([*model.named_modules()])}
    absent: dict[nn.Module, nn.Module] = {}
    for name, module in list(model.named_modules(remove_duplicate=False)):
        parameters = dict(module.named_parameters(recurse=False))
        if f"{name}.".startswith(f"{trace.blocks}.") or kept.issuperset(parameters.values()):
            continue
        first = first_names[module]
        if any(True for _ in module.children()) or any(map(flow.is_real, trace.calls.get(first, ()))):
            flow.omit(module, {key: each for key, each in parameters.items() if each not in kept})
        else:
            if module not in absent:
                absent[module] = _AbsentLayer(module, trace.model.get_submodule(first), flow)
            _replace(model, name, absent[module])


@final
class _Cut(Exception):  # noqa: N818 - not an error
    """Leaves a model's forward at the first block of the next stage."""


@final
class _Flow:
    """Tensors that a stage receives and sends for the current microbatch."""

    def __init__(self, trace: BlockTrace, stage: StageInfo, virtual_layers: int) -> None:
        self.trace, self.stage = trace, stage
        self.own = stage.layers(trace.num_blocks, virtual_before=virtual_layers)
        cuts = [cut for cut in (self.own.start, self.own.stop) if 0 < cut < trace.num_blocks]
        for cut in cuts:
            trace.check_cut(cut)
        self._incoming = [] if stage.is_first else trace.carried(self.own.start)
        self._outgoing = [] if stage.is_last else trace.carried(self.own.stop)
        self._received: dict[int, Any] = {}
        self._sent: dict[int, Any] = {}
        self._features: list[Tensor] = []
        self._omitted: list[tuple[nn.Module, str, Tensor]] = []
        self._expected: set[int] = set()

    def is_real(self, position: int) -> bool:
        """Return True if this stage has the hidden states of a position."""
        return self.own.start < position <= self.own.stop or (self.stage.is_first and position == 0)

    def receives(self, index: int) -> bool:
        """Return True if the call of a block has arguments of earlier stages."""
        return any(each.block == index for group in self._incoming for each in group)

    def omit(self, module: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
        """Remove a module's own parameters, which this stage does not need; its forward reads zeros instead."""
        for key, parameter in parameters.items():
            module._parameters.pop(key)
            self._omitted.append((module, key, torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")))

    def start(self, received: tuple[Any, ...]) -> None:
        """Start the forward of a microbatch with what the previous stage has sent."""
        self._expected = {group[0].block for group in (*self._incoming, *self._outgoing)}
        if self.stage.is_first:
            return
        values = received if isinstance(received[0], Tensor) else received[0]
        self._received = {group[0].value: each for group, each in zip(self._incoming, values, strict=False)}
        self._features = list(values[len(self._incoming) :])
        for module, key, parameter in self._omitted:
            vars(module)[key] = self.zeros(parameter)

    def finish(self) -> Any:
        """Return what the next stage receives."""
        sent = (*(self._sent[group[0].value] for group in self._outgoing), *self._features)
        return sent if len(sent) > 1 else sent[0]

    def clear(self) -> list[int]:
        """Forget the tensors of the microbatch; return the blocks that exchange tensors and were not called."""
        self._received, self._sent, self._features = {}, {}, []
        missing, self._expected = sorted(self._expected), set()
        for module, key, *_ in self._omitted:
            vars(module).pop(key, None)
        return missing

    def zeros(self, like: Tensor) -> Tensor:
        """Return zeros without memory on the device of the microbatch."""
        return torch.zeros((), dtype=like.dtype, device=self.hidden.device).expand(like.shape)

    def exchange_features(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Let a decoder add the received image features; keep the features that later stages add."""
        if found := self._features:
            kwargs["visual_pos_masks"] = torch.ones((), dtype=torch.bool, device=found[0].device)
            kwargs["deepstack_visual_embeds"] = [*[found[0].new_zeros(())] * self.own.start, *found]
            self._features = found[len(self.own) :]
        elif found := kwargs.get("deepstack_visual_embeds"):
            is_image = kwargs["visual_pos_masks"][..., None]
            self._features = [
                each.new_zeros(*is_image.shape[:2], each.shape[-1]).masked_scatter(is_image, each)
                for each in found[self.own.stop :]
            ]
        return args, kwargs

    def replace(self, index: int, call: tuple[Any, Any]) -> tuple[Any, Any]:
        """Return the arguments of a block's call, with what was received."""
        self._expected.discard(index)
        for each in chain.from_iterable(self._incoming):
            if each.block == index:
                call = with_value(call, each.path, self._received[each.value], copies=False)  # blocks share dicts
        return call

    def take(self, index: int, call: tuple[Any, Any]) -> None:
        """Keep the arguments of an absent block that later stages receive. Leave the forward once all are kept."""
        if index < self.own.stop:
            return
        self._expected.discard(index)
        for first, *_ in self._outgoing:
            if first.block == index:
                value = first.value
                self._sent[value] = self._received[value] if value in self._received else _at(call, first.path)
        if len(self._sent) == len(self._outgoing):
            raise _Cut

    @property
    def hidden(self) -> Tensor:
        """Received hidden states of the microbatch."""
        return next(iter(self._received.values()))


class _Entry(nn.Module):
    """Block that receives tensors of earlier stages."""

    stage_entry: tuple[int, _Flow]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        index, flow = self.stage_entry
        args, kwargs = flow.replace(index, (args, kwargs))
        return super().__call__(*args, **kwargs)


class _AbsentError(UserError, AttributeError):
    """Error of a forward that reads an attribute of a module of another stage."""


class Absent(nn.Module):
    """Module of another stage, without its parameters but with its attributes."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        vars(self).update({name: value for name, value in vars(module).items() if name not in _OWN})
        self.training, self._kind = module.training, type(module).__name__

    def __getattr__(self, name: str) -> Any:
        if name in vars(self)["_modules"] or name in vars(self)["_parameters"]:  # a tied parameter
            return super().__getattr__(name)
        raise _AbsentError(
            f"a forward reads {name} of a {vars(self).get('_kind')} of another pipeline stage; expected calls only. "
            "Set mesh.pipeline_parallel to 1."
        )


@final
class _AbsentBlock(Absent):
    """Block of another stage: returns its hidden states in the form of the block's output."""

    def __init__(self, block: nn.Module, index: int, flow: _Flow) -> None:
        super().__init__(block)
        self._place = (index, flow)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        index, flow = self._place
        flow.take(index, (args, kwargs))
        path, output = flow.trace.hidden[index]
        hidden = _at((args, kwargs), path)
        return pytree.tree_map(lambda each: hidden if each is Hidden else each, output)


@final
class _AbsentLayer(Absent):
    """Layer of another stage: returns zeros in the shape of its output."""

    def __init__(self, module: nn.Module, on_meta: nn.Module, flow: _Flow) -> None:
        super().__init__(module)
        self._layer = (on_meta, flow)

    def __getattr__(self, name: str) -> Any:
        """Return zeros for a parameter, because models read its dtype and its device."""
        module, flow = vars(self).get("_layer", (None, None))
        if module is not None and name in module._parameters and name not in self._parameters:
            return flow.zeros(module._parameters[name])
        return super().__getattr__(name)

    @torch.no_grad()
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module, flow = self._layer
        args, kwargs = pytree.tree_map_only(Tensor, lambda each: each.to("meta"), (args, kwargs))
        # The layer on meta has the dtype of the parameters, and hidden states may have that of computation.
        hidden = flow.hidden
        dtypes = {flow.trace.dtype: hidden.dtype}
        return pytree.tree_map_only(
            Tensor,
            lambda each: torch.zeros_like(each, device=hidden.device, dtype=dtypes.get(each.dtype)),
            module(*args, **kwargs),
        )


@final
class _StageForward:
    """Forward of a stage."""

    def __init__(self, model: Any, flow: _Flow) -> None:
        self._forward, self._flow, self._name = model.forward, flow, model.main_input_name
        self._has_tower = hasattr(model.base_model, "get_image_features")

    def __call__(self, *first: Any, **shared: Any) -> Any:
        flow = self._flow
        if not flow.stage.is_first and self._name not in shared and "inputs_embeds" not in shared:
            raise UserError(
                f"got no keyword argument {self._name} on pipeline stage {flow.stage.index}; expected it on every "
                f"stage, for masks and positions. Return {{{self._name!r}: ...}} from the task's inputs."
            )
        if extra := [key for key, value in shared.items() if key.startswith("output_") and value]:
            raise UserError(
                f"got {extra[0]} = {shared[extra[0]]} in a pipeline, whose last stage has only its own blocks; "
                "expected no outputs of each block. Remove it from the task's inputs, or set mesh.pipeline_parallel "
                "to 1."
            )
        if shared.get("pixel_values") is not None and not self._has_tower:
            raise UserError(
                "got pixel_values for a model that does not say which of its modules compute features of images, with "
                "a method get_image_features; expected texts only. Set mesh.pipeline_parallel to 1."
            )
        if not flow.stage.is_first:  # the first stage sends hidden states that have the features of the images
            shared = {key: None if key.startswith("pixel_values") else value for key, value in shared.items()}
        flow.start(first)
        try:
            outputs = self._forward(*(first if flow.stage.is_first else ()), **shared)
        except _Cut:
            outputs = flow.finish()
        finally:
            missing = flow.clear()
        if missing:
            raise UserError(
                f"the forward did not call the block {missing[0]} of {flow.trace.blocks} on pipeline stage "
                f"{flow.stage.index}; expected a call of each block. Set layerdrop of the configuration to 0."
            )
        return outputs


def _at(tree: Any, path: Path) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, key = name.rpartition(".")
    model.get_submodule(parent)._modules[key] = module


def _register(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Register a parameter under its name in the whole model, in empty modules if the path is absent."""
    *path, key = name.split(".")
    for part in path:
        if part not in model._modules:
            model.add_module(part, nn.Module())
        model = model.get_submodule(part)
    model._parameters[key] = parameter


def _keep_buffers_once(model: nn.Module, trace: BlockTrace, stage: StageInfo) -> None:
    """Make persistent buffers outside of blocks non-persistent on later stages: a checkpoint stores one of them."""
    for name, module in model.named_modules() if not stage.is_first else ():
        if f"{name}.".startswith(f"{trace.blocks}."):
            continue
        for key, buffer in module._buffers.items():
            if buffer is None or key in module._non_persistent_buffers_set:
                continue
            if buffer.is_meta:
                raise UserError(
                    f"{type(model).__name__} reads the buffer {name}.{key} from its files on every stage; expected "
                    "only parameters outside of the blocks. Set mesh.pipeline_parallel to 1."
                )
            module._non_persistent_buffers_set.add(key)
