"""Record of the experts that the routers of a decoder choose, for routing replay."""

from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from d9d_dist import UserError
from d9d_modules import DecoderLayer, DecoderModel
from d9d_moe.layer import MoELayer
from d9d_moe.router import Routing


@contextmanager
def record_experts(model: nn.Module) -> Generator[Mapping[int, list[Tensor]]]:
    """Record the experts of each token in each forward pass of the body, for `Engine.score`.

    Tensor-parallel ranks gather the records of the whole sequence: one all-gather for each layer.

    Args:
        model: Model, or this rank's pipeline stages of it.

    Yields:
        For each layer of this rank, by its index in the whole model, the experts [B, L, A] of each forward pass, int64.
        The lists of layers without experts are empty.

    Raises:
        UserError: If `model` has no `DecoderModel`.
    """
    backbones = [module for module in model.modules() if isinstance(module, DecoderModel)]
    if not backbones:
        raise UserError(f"got a {type(model).__name__} without a DecoderModel; expected a decoder of d9d_modules.")
    found: dict[int, list[Tensor]] = {}
    with ExitStack() as hooks:
        for backbone in backbones:
            for name, layer in backbone.layers.items():
                found[int(name)] = []
                assert isinstance(layer, DecoderLayer)
                if isinstance(layer.feed_forward, MoELayer):
                    _record_layer(layer.feed_forward, found[int(name)], backbone, hooks)
        yield found


def _record_layer(layer: MoELayer, found: list[Tensor], backbone: DecoderModel, hooks: ExitStack) -> None:
    """Append the experts of each forward pass of a layer to `found`, until `hooks` is closed."""
    shapes: list[tuple[int, ...]] = []

    def before(module: nn.Module, args: tuple[Any, ...]) -> None:
        shapes.append(args[0].shape[:-1])

    def after(module: nn.Module, args: tuple[Any, ...], routing: Routing) -> None:
        found.append(backbone.all_losses(routing.indices.detach().unflatten(0, shapes.pop())).clone())

    for handle in (layer.register_forward_pre_hook(before), layer.get_submodule("router").register_forward_hook(after)):
        hooks.callback(handle.remove)
