"""Stages of a model with a vision tower: the first one has fewer blocks, as many as the tower costs."""

from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import vision_cases
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from vision_cases import CHATS, assert_trained, plain_training, save_chats, save_model, vision_config, wide_norms

from d9d_dist import Launch, StageInfo, UserError
from d9d_dist.testing import run_ranks
from d9d_loop import Trainer, hugging_face_model
from d9d_loop.job.plan import JobPlan
from d9d_loop.jobs import text_trainer
from d9d_loop.jobs.text_tasks import NextToken
from d9d_loop.jobs.vision_data import image_chats
from d9d_loop.model import _tower_cost
from d9d_loop.task import to_inputs

NUM_BLOCKS = 8
BATCH = {"global_size": 2, "microbatch_size": 1}


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("released")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(vision_cases.TEXT, "num_hidden_layers", NUM_BLOCKS)
        for family in ("gemma3", "qwen2_5_vl", "qwen3_vl"):
            save_model(family, root / family)
    save_chats(root, CHATS)
    return root


def _plan(released: Path, family: str, **more: Any) -> JobPlan:
    options = {"mesh": {"pipeline_parallel": 2}, **more}
    config = vision_config(released / family, released / "chats.jsonl", released, **options)
    return text_trainer(config).plan_for(Launch(world_size=2, device="cpu"))


@cache
def _balanced(released: Path, family: str) -> JobPlan:
    return _plan(released, family)


@cache
def _flops(released: Path, family: str) -> tuple[int, float]:
    """Return the FLOPs of the tower and of a block, from a forward of the first microbatch with values."""
    plan = _balanced(released, family)
    auto: Any = import_module("transformers").AutoModelForImageTextToText
    model = auto.from_pretrained(released / family).train()
    calls: list[Any] = []
    model.model.get_image_features, function = (
        lambda *args, **kwargs: calls.append((args, kwargs)) or function(*args, **kwargs),
        model.model.get_image_features,
    )
    inputs = to_inputs(plan.task.inputs(plan.first_batch())).shared
    with FlopCounterMode(display=False) as of_all:
        model(**inputs)
    with FlopCounterMode(display=False) as of_tower:
        function(*calls[0][0], **calls[0][1])
    with FlopCounterMode(display=False) as of_head:
        model.lm_head(model.get_input_embeddings()(inputs["input_ids"]))
    tower = of_tower.get_total_flops()
    return tower, (of_all.get_total_flops() - tower - of_head.get_total_flops()) / NUM_BLOCKS


def _cost(released: Path, family: str, *, passes: tuple[int, int]) -> float:
    """Return the FLOPs of the tower in those of a block."""
    of_tower, of_block = _flops(released, family)
    return passes[0] * of_tower / (passes[1] * of_block)


@pytest.mark.slow("qwen2_5_vl")
@pytest.mark.parametrize("family", ["gemma3", "qwen2_5_vl"])
def test_the_first_stage_has_as_many_blocks_fewer_as_the_tower_costs(family: str, released: Path) -> None:
    plan = _balanced(released, family)
    cost = round(_cost(released, family, passes=(3, 3)))
    assert 1 <= cost < NUM_BLOCKS - 1
    assert plan.model.provider.virtual_layers == cost
    names = [name for name, _ in plan.model.provider.build(StageInfo(0, 2)).named_parameters()]
    blocks = {name.split(".layers.")[1].split(".")[0] for name in names if "language_model.layers." in name}
    assert len(blocks) == (NUM_BLOCKS + cost + 1) // 2 - cost
    frozen = _plan(released, family, freeze=["vision_tower|visual|projector"])
    assert frozen.model.provider.virtual_layers == round(_cost(released, family, passes=(1, 3)))


def test_the_cost_is_in_the_share_of_a_block_that_a_rank_computes(released: Path) -> None:
    mesh = {"pipeline_parallel": 2, "tensor_parallel": 2}
    config = vision_config(released / "gemma3", released / "chats.jsonl", released, mesh=mesh)
    plan = text_trainer(config).plan_for(Launch(world_size=4, device="cpu"))
    cost = _cost(released, "gemma3", passes=(3, 3))
    assert plan.model.provider.virtual_layers == round(2 * cost) > round(cost)


@pytest.mark.slow("find_blocks")
@pytest.mark.parametrize("function", ["known_values", "find_blocks"])
def test_stages_are_even_if_the_cost_cannot_be_measured(
    function: str, released: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise UserError("this tower reads a value")

    monkeypatch.setattr(_tower_cost, function, fail)
    assert _plan(released, "gemma3").model.provider.virtual_layers == 0


@pytest.mark.slow
def test_experts_are_a_part_of_the_cost_of_a_block(tmp_path: Path) -> None:
    save_chats(tmp_path, CHATS)
    costs = []
    for size in (16, 2048):
        family = f"experts of {size}"
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(vision_cases.TEXT, "num_hidden_layers", NUM_BLOCKS)
            sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": size}
            patch.setitem(vision_cases.FAMILIES, family, lambda sizes=sizes: vision_cases._qwen3(**sizes))
            save_model(family, tmp_path / family)
        costs.append(_plan(tmp_path, family).model.provider.virtual_layers)
    assert costs[0] > 1 > costs[1]


def test_gradients_of_inputs_reach_back_to_the_first_trained_parameter() -> None:
    parameters = [nn.Parameter(torch.zeros(size), requires_grad=size == 2) for size in (5, 2, 3)]
    assert _tower_cost._trained(parameters) == (0.5, 0.2)
    assert _tower_cost._trained(parameters[:1]) == (0.0, 0.0)


def _train(model: Path, file: Path, runs: Path) -> None:
    config = vision_config(model, file, runs, mesh={"pipeline_parallel": 2}, batch=BATCH, steps=1)
    auto: Any = import_module("transformers").AutoModelForImageTextToText
    built = hugging_face_model(model, auto, dtype=torch.float64)
    with wide_norms():
        Trainer(config, model=built, data=image_chats(config, print), task=NextToken(counts_skipped=True)).train()
    assert 0 < built.virtual_layers < NUM_BLOCKS / 2


@pytest.mark.sample("gemma3")
@pytest.mark.parametrize("family", ["gemma3", "qwen2_5_vl", "qwen3_vl"])
def test_balanced_stages_equal_a_plain_loop(family: str, released: Path, tmp_path: Path) -> None:
    """The features of images of Qwen3-VL are also added behind the first block."""
    losses, parameters = plain_training(released / family, released / "chats.jsonl", CHATS, sizes=(2,))
    run_ranks(_train, released / family, released / "chats.jsonl", tmp_path, world_size=2)
    assert_trained(tmp_path / "vision", losses, parameters)
