from collections.abc import Mapping
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from d9d_dist import ContextSplit, DistributedContext, MeshConfig, StageInfo, UserError
from d9d_dist.testing import assert_trees_close, full_gradients, run_ranks
from d9d_loop import GradientsReady, Loss, StepDone, Task, Trainer, TrainerConfig, hugging_face_model, validate_config
from d9d_loop.model._context_trace import trace_context
from d9d_loop.model._hugging_face_context import _RowsForward

Batch = dict[str, torch.Tensor]
_SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
_LENGTH, _NUM_SAMPLES = 16, 2


def _save(folder: Path) -> None:
    """Write a decoder with a sliding and a full layer."""
    import transformers

    torch.manual_seed(0)
    more = {"head_dim": 8, "sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]}
    config = transformers.Gemma3TextConfig(**_SIZES, **more, query_pre_attn_scalar=8, dtype=torch.float64)
    transformers.Gemma3ForCausalLM(config).double().save_pretrained(folder)


def _samples() -> list[Batch]:
    """Return rows of two documents each, with labels that do not cross documents."""
    samples = []
    for end in (5, 11):
        positions = torch.cat([torch.arange(end), torch.arange(_LENGTH - end)])
        ids = torch.randint(1, 32, (_LENGTH,), generator=torch.Generator().manual_seed(end))
        labels = torch.where(positions.roll(-1) == 0, -100, ids.roll(-1))
        samples.append({"input_ids": ids, "position_ids": positions, "labels": labels})
    return samples


def _loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


class _NextToken(Task):
    def inputs(self, batch: Batch) -> Mapping[str, Any]:
        return {key: batch[key] for key in ("input_ids", "position_ids")}

    def split_sequence(self, batch: Batch, split: ContextSplit) -> Batch:
        return split.split(batch)

    def loss(self, outputs: Any, batch: Batch) -> Loss:
        return Loss(_loss(outputs.logits, batch["labels"]), weight=(batch["labels"] != -100).sum())


class _ShiftsInShards(_NextToken):
    """A mutant: the label of a rank's last token is its first one."""

    def split_sequence(self, batch: Batch, split: ContextSplit) -> Batch:
        part = split.split(batch)
        return {**part, "labels": torch.where(part["labels"] == -100, -100, part["input_ids"].roll(-1, 1))}


def _documents() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the ids and the labels of each document alone."""
    found = []
    for sample in _samples():
        end = int(sample["position_ids"].diff().argmin()) + 1
        parts = (slice(0, end), slice(end, None))
        found.extend((sample["input_ids"][part], sample["labels"][part]) for part in parts)
    return found


def _plain(folder: Path) -> tuple[list[float], list[dict[str, torch.Tensor]]]:
    import transformers

    model: Any = transformers.Gemma3ForCausalLM.from_pretrained(folder, dtype=torch.float64)
    num_labels = torch.stack([sample["labels"] != -100 for sample in _samples()]).sum()
    losses, gradients = [], []
    for _ in range(2):
        of_documents = [_loss(model(input_ids=ids[None]).logits, labels[None]) for ids, labels in _documents()]
        loss = torch.stack(of_documents).sum() / num_labels
        model.zero_grad()
        loss.backward()
        losses.append(loss.item())
        gradients.append({name: each.grad.clone() for name, each in model.named_parameters()})
        with torch.no_grad():
            for each in model.parameters():
                each.sub_(0.1 * each.grad)
    return losses, gradients


def _train(folder: str, mesh: Mapping[str, int], task: type[Task]) -> dict[str, Any]:
    seen: dict[str, Any] = {"losses": [], "gradients": []}
    values = {
        "steps": 2,
        "batch": {"global_size": _NUM_SAMPLES, "microbatch_size": 1},
        "mesh": mesh,
        "run": {"folder": str(Path(folder) / task.__name__)},
        "gradients": {"max_norm": None},
        "trackers": (),
        "export": False,
        "logging": {"progress": False, "draw_lr_schedule": False},
        "resilience": {"watchdog": {"enabled": False}, "health": {"enabled": False}},
    }
    trainer = Trainer(
        validate_config(TrainerConfig, values),
        model=hugging_face_model(Path(folder) / "model", dtype=torch.float64),
        data=_samples(),
        task=task(),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        lr_schedule=lambda step: 1.0,
    )
    trainer.events.on(GradientsReady, lambda event: seen["gradients"].append(full_gradients(event.model)))
    trainer.events.on(StepDone, lambda event: seen["losses"].append(event.loss.item()))
    trainer.train()
    return seen


@pytest.mark.parametrize(
    "mesh",
    [
        {},
        {"context_parallel_shard": 2},
        pytest.param({"tensor_parallel": 2}, marks=pytest.mark.full),
        pytest.param({"context_parallel_shard": 2, "pipeline_parallel": 2}, marks=pytest.mark.full),
        pytest.param({"context_parallel_replicate": 2, "data_parallel_shard": 2}, marks=pytest.mark.full),
    ],
    ids=["one", "cp", "tp", "cp-pp", "cp-dp"],
)
def test_packed_documents_train_in_each_layout_as_alone_in_a_plain_loop(mesh: dict[str, int], tmp_path: Path) -> None:
    _save(tmp_path / "model")
    losses, gradients = _plain(tmp_path / "model")
    ranks = run_ranks(_train, str(tmp_path), mesh, _NextToken, world_size=prod(mesh.values()))
    assert_trees_close(ranks[-1]["losses"], losses, rtol=1e-6)  # norms and rotary tables compute in float32
    for step, expected in enumerate(gradients):
        found = {name: each for rank in ranks for name, each in rank["gradients"][step].items()}
        assert_trees_close(found, expected, rtol=1e-5)
    if mesh == {"context_parallel_shard": 2}:
        [mutant, _] = run_ranks(_train, str(tmp_path), mesh, _ShiftsInShards, world_size=2)
        assert abs(mutant["losses"][0] / losses[0] - 1) > 1e-5  # ten times the tolerance above


def _tiny(kind: str, **more: Any) -> Any:
    import transformers

    config = getattr(transformers, f"{kind}Config")(**_SIZES, **more)
    return transformers.AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize(
    ("kind", "more", "message"),
    [
        (
            "XLNet",
            {"d_head": 8},
            "XLNetLMHeadModel cannot be split over context-parallel ranks: in transformer, a block receives",
        ),
        ("Mixtral", {"output_router_logits": True}, "MixtralForCausalLM cannot be split over context-parallel ranks: "),
    ],
    ids=["permutations", "router losses"],
)
def test_code_that_combines_positions_is_an_error_that_names_its_module(
    kind: str, more: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError) as caught:
        trace_context(_tiny(kind, **more))
    assert str(caught.value).startswith(message)
    assert "Set mesh.context_parallel_shard to 1" in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "whole"),
    [
        ("Mamba", {"backbone.layers.0.mixer": {(): 1}, "backbone.layers.1.mixer": {(): 1}}),
        ("Bloom", {f"transformer.h.{index}.self_attention": {(0,): 1, (1,): 2} for index in (0, 1)}),
        ("GPT2", {"transformer": {("last_hidden_state",): 1}}),
    ],
    ids=["recurrent", "own attention", "behind the blocks"],
)
def test_modules_that_combine_positions_compute_whole_rows(kind: str, whole: dict[str, Any]) -> None:
    trace = trace_context(_tiny(kind))
    assert {name: rows.outputs for name, rows in trace.whole.items()} == whole
    assert all(rows.reason and rows.inputs for rows in trace.whole.values())


def test_experts_and_windows_are_split() -> None:
    trace = trace_context(_tiny("Mixtral", sliding_window=3))
    assert trace.attention == {"model.layers.0.self_attn", "model.layers.1.self_attn"}
    assert trace.splits[1][(1, "attention_mask")] == 2


def _messages(folder: str) -> list[str]:
    messages = []
    with MeshConfig(context_parallel_shard=2).build() as ctx:
        for options, inputs in _WRONG:
            with pytest.raises(UserError) as caught:
                _run_wrong(folder, options, inputs, ctx)
            messages.append(str(caught.value))
    return messages


def _run_wrong(folder: str, options: dict[str, Any], inputs: dict[str, Any], ctx: DistributedContext) -> None:
    provider = hugging_face_model(folder, from_scratch=True)
    model: Any = provider.build(StageInfo())
    for name, value in options.items():
        setattr(model.config, name, value)
    provider.parallelize(model, ctx)
    model(**inputs)


_IDS = torch.zeros(1, 4, dtype=torch.int64)
_WRONG: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"_attn_implementation": "flex_attention"}, {}),
    ({}, {"inputs_embeds": torch.zeros(1, 4, 16)}),
    ({}, {"input_ids": _IDS, "labels": _IDS}),
    ({}, {"input_ids": _IDS, "logits_to_keep": 2}),
    ({}, {"input_ids": _IDS, "logits_to_keep": torch.tensor([7])}),
    ({}, {"input_ids": _IDS, "cache_position": torch.arange(4)}),
]


def test_what_parts_of_rows_do_not_support_is_an_error(tmp_path: Path) -> None:
    _save(tmp_path)
    for messages in run_ranks(_messages, str(tmp_path), world_size=2):
        assert messages[0].startswith("the model has attn_implementation = 'flex_attention' on several")
        assert messages[1].startswith("got no keyword argument input_ids on several context-parallel ranks")
        for name, message in zip(("labels", *["logits_to_keep"] * 2, "cache_position"), messages[2:], strict=True):
            assert message.startswith(f"got {name} for Gemma3ForCausalLM on several context-parallel ranks")


@pytest.mark.parametrize(
    ("kind", "methods", "given"),
    [
        ("mllama", {}, "pixel_values"),
        ("qwen2_vl", {"get_image_features": ["pixel_values", "image_grid_thw"]}, "image_grid_thw"),
        ("qwen2_5_vl", {"get_video_features": ["pixel_values_videos"]}, "pixel_values_videos"),
    ],
)
def test_images_and_videos_that_were_not_compared_are_an_error(
    kind: str, methods: dict[str, list[str]], given: str
) -> None:
    base = SimpleNamespace()
    for name, parameters in methods.items():
        base.__dict__[name] = eval(f"lambda {', '.join(parameters)}: None")  # noqa: S307
    model = SimpleNamespace(
        forward=None, main_input_name="input_ids", config=SimpleNamespace(model_type=kind), base_model=base
    )
    unused: Any = None
    forward = _RowsForward(model, split=unused, parts=unused)
    with pytest.raises(UserError, match=rf"got {given} for SimpleNamespace .*; expected texts only, or images for one"):
        forward(input_ids=torch.zeros(1, 4), **{given: torch.zeros(1, 4)})
