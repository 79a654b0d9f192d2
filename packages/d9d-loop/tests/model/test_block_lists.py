"""All routes have the same blocks: FSDP, recomputed activations, pipelines, context parallelism, and the planner."""

from typing import Any

import pytest
from torch import nn
from torch.distributed.fsdp import FSDPModule

from d9d_dist import MeshConfig, StageInfo
from d9d_dist.testing import run_ranks
from d9d_loop import hugging_face_model
from d9d_loop.model._block_trace import trace_blocks
from d9d_loop.model._context_trace import trace_context
from d9d_loop.model.block_lists import block_lists, blocks_of
from d9d_loop.model.hugging_face_model import _gathered_blocks
from d9d_loop.model.model_options import ModelOptions
from d9d_loop.planning.layer_repeats import without_repeats

_SIZES = {
    "ctrl": {"vocab_size": 32, "n_positions": 16, "n_embd": 8, "dff": 16, "n_layer": 3, "n_head": 2},
    "llama": {
        "vocab_size": 32,
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
    },
}
_BLOCKS = {"ctrl": "transformer.h", "llama": "model.layers"}


def _model(name: str) -> tuple[Any, Any]:
    import transformers

    config = transformers.AutoConfig.for_model(name, **_SIZES[name])
    provider = hugging_face_model(config, transformers.AutoModelForCausalLM)
    return provider, provider.build(StageInfo())


def _gathered(name: str) -> set[str]:
    provider, model = _model(name)
    with MeshConfig(data_parallel_shard=2).build() as ctx:
        provider.parallelize(model.to_empty(device="meta"), ctx)
    return {each for each, module in model.named_modules() if isinstance(module, FSDPModule) and module is not model}


def _recomputed(model: nn.Module) -> set[str]:
    def patched() -> set[str]:
        return {name for name, module in model.named_modules() if "forward" in vars(module)}

    before = patched()
    ModelOptions(recompute="blocks").apply(model)
    return patched() - before


@pytest.mark.parametrize("name", _SIZES)  # the authors of CTRL name no modules that may not be split
def test_all_routes_have_the_same_blocks(name: str) -> None:
    _, model = _model(name)
    copied, layers, _ = without_repeats(model, 0)
    pipeline = trace_blocks(model)
    found = {
        "planner": {each for each, module in copied.named_modules() if module in layers},
        "pipelines": {f"{pipeline.blocks}.{index}" for index in range(pipeline.num_blocks)},
        "contexts": {f"{trace_context(model).blocks}.{index}" for index in range(3)},
        "recomputed": _recomputed(model),
        "gathered": run_ranks(_gathered, name, world_size=2)[0],
    }
    assert found == {route: {f"{_BLOCKS[name]}.{index}" for index in range(3)} for route in found}


def _linears(count: int) -> list[nn.Module]:
    return [nn.Linear(2, 2) for _ in range(count)]


def test_inner_lists_are_not_blocks_and_the_largest_list_is_first() -> None:
    layer = nn.Module()
    layer.add_module("experts", nn.ModuleList(_linears(3)))
    lists = {
        "small": nn.ModuleList(_linears(1)),
        "large": nn.ModuleDict({"0": layer, "1": nn.Linear(2, 2)}),
        "empty": nn.ModuleList(),
        "parts": nn.ModuleList([nn.ModuleList(_linears(2)), nn.ModuleList(_linears(1))]),
    }
    model = nn.Module()
    for name, each in lists.items():
        model.add_module(name, each)
    assert list(block_lists(model)) == ["large", "parts.0", "small", "parts.1"]
    assert len(blocks_of(model)) == 6


def _tower(depth: int, width: int = 2) -> nn.Module:
    tower = nn.Module()
    tower.add_module("embed", nn.Linear(width, width))
    tower.add_module("layers", nn.ModuleList([nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(depth)]))
    return tower


def test_a_dictionary_of_towers_has_the_lists_of_the_towers() -> None:
    model = nn.Module()
    model.add_module("towers", nn.ModuleDict({"image": _tower(2), "text": _tower(3)}))
    assert list(block_lists(model)) == ["towers.text.layers", "towers.image.layers"]
    assert [type(each) for each in blocks_of(model)] == [nn.Sequential] * 5


@pytest.mark.parametrize(
    "layers",
    [
        {"0": _tower(2), "1": _tower(3)},  # numbered layers, which may have lists of experts
        {"layer0": _tower(2), "layer1": _tower(3)},
        {"first": _tower(1, width=8), "second": _tower(1, width=8)},  # most of it is not in lists
    ],
    ids=["numbers", "numbered", "small lists"],
)
def test_a_dictionary_of_layers_has_these_layers(layers: dict[str, nn.Module]) -> None:
    model = nn.Module()
    model.add_module("layers", nn.ModuleDict(layers))
    assert list(block_lists(model)) == ["layers"]


def test_a_list_with_a_forward_is_a_block() -> None:
    class Chain(nn.ModuleList):
        def forward(self, x: Any) -> Any:
            for each in self:
                x = each(x)
            return x

    model = nn.Module()
    chains = [Chain(_linears(2)), Chain(_linears(2))]
    model.add_module("layers", nn.ModuleList(chains))
    assert list(block_lists(model)) == ["layers"]
    assert blocks_of(model) == chains


def test_a_block_of_two_lists_is_one_block_and_what_it_shares_is_gathered_with_the_rest() -> None:
    shared, own, other = (nn.Sequential(nn.Linear(2, 2)) for _ in range(3))
    mixed = nn.Module()
    mixed.add_module("shared", shared)
    mixed.add_module("own", own)
    model = nn.Module()
    model.add_module("encoder", nn.ModuleList([shared, other]))
    model.add_module("decoder", nn.ModuleList([shared, mixed]))
    assert blocks_of(model).count(shared) == 1
    assert _gathered_blocks(model) == [other, own]
