"""Plans of the job `vision`: FLOPs and memory of a dry run equal those of a step on the CPU."""

from collections.abc import Generator
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from text_job_cases import IDS, job_config, save_folder, write_lines
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from vision_cases import CHATS, FAMILIES, TEXT, _qwen3, chat, image, save_chats, save_model, text, vision_config

from d9d_dist import Launch
from d9d_loop import Trainer
from d9d_loop.job.flop_measurement import measure_flops
from d9d_loop.job.flop_meter import FlopMeter
from d9d_loop.jobs import text_trainer
from d9d_loop.model.built_model import meta_copy
from d9d_loop.planning import plan_cluster
from d9d_loop.planning.dry_runs import dry_run
from d9d_loop.planning.model_shape import shape_of_job
from d9d_loop.planning.step_record import recorded
from d9d_loop.task import to_inputs, with_reference


def _wide_experts(build: Any) -> Any:
    return build(moe_intermediate_size=16)


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Generator[Path]:
    root = tmp_path_factory.mktemp("released")
    save_chats(root, CHATS)
    with pytest.MonkeyPatch.context() as patch:
        for family in ("qwen3_vl_moe", "glm4v_moe"):  # grouped products in bfloat16 need rows of 16 bytes
            patch.setitem(FAMILIES, family, partial(_wide_experts, FAMILIES[family]))
        yield root


def _trainer(released: Path, family: str, **more: Any) -> Trainer:
    folder = released / family
    if not folder.is_dir():
        save_model(family, folder)
    return text_trainer(vision_config(folder, released / "chats.jsonl", released, **more))


@pytest.mark.slow("idefics3", "gemma3")
@pytest.mark.sample("qwen2_5_vl", "idefics3", "gemma3")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_dry_run_has_the_flops_and_the_memory_of_a_step(family: str, released: Path) -> None:
    trainer = _trainer(released, family, batch={"global_size": 2, "microbatch_size": 2})
    plan = trainer.plan_for(Launch(world_size=1, device="cpu"))
    dry = dry_run(plan, ranks=[0], world_size=1)[0].forward_backward
    transformers: Any = import_module("transformers")
    model = transformers.AutoModelForImageTextToText.from_pretrained(released / family).train()
    batch = plan.first_batch()

    def run_step() -> None:
        inputs = to_inputs(plan.task.inputs(batch))
        plan.task.loss(model(*inputs.first, **inputs.shared), batch).total.backward()

    with recorded() as real:
        run_step()
    model.zero_grad()
    with FlopCounterMode(display=False) as counter:  # apart, because it keeps hidden states in memory
        run_step()
    flops = sum(each.flops for each in real.operations)
    assert sum(each.flops for each in dry.operations) == flops
    if "moe" not in family:  # torch's counter does not count grouped products
        assert flops == counter.get_total_flops()
    assert dry.peak_bytes == pytest.approx(real.peak_bytes, rel=0.02)


@pytest.mark.slow("llava_onevision")
@pytest.mark.sample("qwen3_vl", "llava_onevision", "mistral3")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_tower_has_the_flops_of_its_modules(family: str, released: Path) -> None:
    plan = _trainer(released, family, batch={"global_size": 2, "microbatch_size": 2}).plan_for(
        Launch(world_size=1, device="cpu")
    )
    tower = shape_of_job(plan)[0].tower
    assert tower is not None
    transformers: Any = import_module("transformers")
    model = transformers.AutoModelForImageTextToText.from_pretrained(released / family).train()
    batch = plan.first_batch()
    inputs = to_inputs(plan.task.inputs(batch))
    with FlopCounterMode(display=False) as counter:
        model(**inputs.shared)
    decoder = model.get_decoder()
    found, root = counter.get_flop_counts(), type(model).__name__
    names = [name for name, each in model.named_modules() if each in {decoder, model.get_output_embeddings()}]
    flops = {name: sum(each.values()) for name, each in found.items()}
    expected = flops[root] - sum(flops[f"{root}.{name}"] for name in names)
    assert sum(each.flops * each.number for each in tower.forward) == expected
    own = [each for name, each in model.named_parameters() if not name.startswith(("lm_head", *names))]
    assert tower.num_parameters == sum(each.numel() for each in own)

    def trained() -> int:
        with FlopCounterMode(display=False) as counter:
            plan.task.loss(model(**inputs.shared), batch).total.backward()
        return counter.get_total_flops()

    whole = trained()
    for each in own:
        each.requires_grad_(False)
    assert sum(each.flops * each.number for each in tower.backward) == whole - trained()


MESHES: dict[str, dict[str, int]] = {
    "fsdp": {"data_parallel_shard": 2},
    "tensor": {"tensor_parallel": 2},
    "pipeline": {"pipeline_parallel": 2},
    "context": {"context_parallel_shard": 2},
}
ONE_ROW = ("tensor", "context")
"""Meshes whose ranks share each microbatch: one is enough for a step."""


@pytest.mark.slow("gemma3-fsdp", "internvl-tensor", "qwen3_vl-pipeline")
@pytest.mark.sample("qwen2_5_vl-context", "qwen3_vl-pipeline", "gemma3-fsdp", "internvl-tensor")
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_job_with_images_is_planned(family: str, mesh: str, released: Path) -> None:
    batch = {"global_size": 1 if mesh in ONE_ROW else 2, "microbatch_size": 1}
    trainer = _trainer(released, family, mesh=MESHES[mesh], batch=batch)
    plan = plan_cluster(trainer, world_size=2, hardware="h100-dgx")
    shape = plan.timed.shape
    assert shape.tower is not None
    transformers: Any = import_module("transformers")
    of_text = transformers.AutoConfig.from_pretrained(released / family).text_config
    assert (shape.vocab_size, shape.hidden_size) == (of_text.vocab_size, of_text.hidden_size)
    inner = 0 if family == "qwen3_vl_moe" else of_text.intermediate_size  # all of its layers have experts
    assert (shape.num_layers, shape.intermediate_size) == (of_text.num_hidden_layers, inner)
    heads = (
        of_text.num_attention_heads,
        of_text.num_key_value_heads,
        of_text.hidden_size // of_text.num_attention_heads,
    )
    assert (shape.num_heads, shape.num_kv_heads, shape.head_dim) == heads
    assert plan.layout.recompute == "none"
    assert plan.memory[0].parameters > 0
    assert plan.layout.logit_share < 1
    assert plan.layout.loss_chunk is None


@pytest.mark.slow("none-all", "none-frozen", "full-all", "full-frozen", "decoder-frozen")
@pytest.mark.parametrize("freeze", [[], ["visual"]], ids=["all", "frozen"])
@pytest.mark.parametrize(
    ("recompute", "modules"),
    [("none", None), ("full", "blocks"), ("full", r"model\.language_model\.layers\.\d+")],
    ids=["none", "full", "decoder"],
)
def test_a_tower_is_no_recomputation_of_the_decoder(
    freeze: list[str], recompute: str, modules: str | None, released: Path
) -> None:
    batch = {"global_size": 1, "microbatch_size": 1}
    trainer = _trainer(released, "qwen2_5_vl", freeze=freeze, activation_checkpointing=modules, batch=batch)
    plan = plan_cluster(trainer, world_size=1, hardware="h100-dgx")
    assert (plan.layout.recompute, plan.layout.recompute_every) == (recompute, 1)


def test_a_tower_as_long_as_the_rows_is_no_context_parallelism_by_heads(tmp_path: Path) -> None:
    chats = save_chats(tmp_path, [chat([image(0), text("what is it, and where")], "a cat")] * 4)
    folder = save_model("mistral3", tmp_path / "model")
    batch = {"global_size": 1, "microbatch_size": 1}
    trainer = text_trainer(vision_config(folder, chats, tmp_path, mesh=MESHES["context"], batch=batch))
    plan = plan_cluster(trainer, world_size=2, hardware="h100-dgx")
    tower = plan.timed.shape.tower
    assert tower is not None
    assert {each.shapes[0][-2] for each in tower.forward if "scaled_dot" in each.name} == {plan.layout.length}
    assert not any("context parallelism" in each for each in plan.timed.not_modeled)


def _pairs_trainer(released: Path, **more: Any) -> Trainer:
    turn = {"role": "user", "content": [image(0), text("what is it?")]}
    pair = {"prompt": [turn], **{key: [{"role": "assistant", "content": key}] for key in ("chosen", "rejected")}}
    data = {"files": [write_lines(released / "pairs.jsonl", [pair] * 4)], "length": 64}
    batch = {"global_size": 2, "microbatch_size": 1}
    return _trainer(released, "qwen2_5_vl", **{"job": "dpo", "dataset": data, "batch": batch, **more})


@pytest.mark.slow("fsdp", "pipeline", "tensor")
@pytest.mark.parametrize("mesh", MESHES)
def test_pairs_are_planned(mesh: str, released: Path) -> None:
    batch = {"global_size": 1 if mesh in ONE_ROW else 2, "microbatch_size": 1}
    trainer = _pairs_trainer(released, mesh=MESHES[mesh], batch=batch)
    timed = plan_cluster(trainer, world_size=2, hardware="h100-dgx").timed
    assert timed.shape.tower is not None
    assert "the forward pass of the reference" in timed.not_modeled
    assert "microbatches with 2 rows for 1 sample (timed as 1)" in timed.not_modeled


def test_a_dry_run_of_pairs_has_the_flops_and_the_memory_of_a_step(released: Path) -> None:
    trainer = _pairs_trainer(released)
    plan = trainer.plan_for(Launch(world_size=1, device="cpu"))
    dry = dry_run(plan, ranks=[0], world_size=1)[0].first
    transformers: Any = import_module("transformers")
    model = transformers.AutoModelForImageTextToText.from_pretrained(released / "qwen2_5_vl").train()
    batch = plan.first_batch()
    inputs = to_inputs(plan.task.inputs(batch))
    with torch.no_grad():
        batch = with_reference(plan.task, model(**inputs.shared), batch)
    with recorded() as real, FlopCounterMode(display=False) as counter:
        inputs = to_inputs(plan.task.inputs(batch))
        plan.task.loss(model(**inputs.shared), batch).total.backward()
    flops = [sum(each.flops for each in record.operations) for record in (dry, real)]
    assert flops == [counter.get_total_flops()] * 2
    assert dry.peak_bytes == pytest.approx(real.peak_bytes, rel=0.02)


def _text_trainer(released: Path, batch: dict[str, int]) -> Trainer:
    transformers: Any = import_module("transformers")
    sizes = {key: each for key, each in TEXT.items() if not key.endswith(("token_id", "vocab_size"))}
    folder = save_folder(released / "text", transformers.Qwen3Config(**sizes, **IDS), "Qwen3ForCausalLM")
    (folder / "chat_template.jinja").write_text("{% for each in messages %}{{ each.content }}</s>{% endfor %}")
    file = write_lines(released / "texts.jsonl", [{"prompt": "what is it?", "completion": "a cat"}] * 4)
    return text_trainer(job_config("sft", {"folder": folder}, file, released / "runs", batch=batch))


@pytest.mark.slow("sft")
@pytest.mark.parametrize("job", ["sft", "vision"])
def test_the_mfu_has_the_flops_that_the_job_counts(job: str, released: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In microbatches of one row, each position has a label."""
    batch = {"global_size": 2, "microbatch_size": 1}
    trainer = _text_trainer(released, batch) if job == "sft" else _trainer(released, "qwen2_5_vl", batch=batch)
    plan = plan_cluster(trainer, world_size=1, hardware="h100-dgx")
    found = plan.mfu * plan.time.total * plan.hardware.device.peak_flops["bf16"]
    # The measurement replaces this function for the rest of the process.
    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", nn.functional.scaled_dot_product_attention)
    made = trainer.plan_for(Launch(world_size=1, device="cpu"))
    first = made.first_batch()
    formula, _ = measure_flops(meta_copy(made.model.built.module), made.task, first)
    meter = FlopMeter(formula, made.task)
    meter.add(inputs := to_inputs(made.task.inputs(first)), first)
    of_batch = float(meter.take())
    assert found == pytest.approx(2 * of_batch, rel=1e-12)
    num_labels = int((first["labels"] != -100).sum())
    assert 0 < num_labels == plan.layout.logit_tokens < plan.layout.tokens_per_microbatch
    assert plan.layout.loss_chunk is None
    if formula.images is not None:
        assert plan.images is not None
        share = float(formula.images.of(inputs.shared)) / of_batch
        assert plan.images["share_of_flops"] == pytest.approx(share, rel=1e-12)


def test_packed_rows_are_planned(released: Path) -> None:
    dataset = {"files": [released / "chats.jsonl"], "length": 160, "packing": True}
    trainer = _trainer(released, "qwen2_5_vl", dataset=dataset, batch={"global_size": 1, "microbatch_size": 1})
    plan = plan_cluster(trainer, world_size=1, hardware="h100-dgx")
    assert 100 < plan.layout.length <= 160


@pytest.mark.slow("four stages")
@pytest.mark.parametrize(
    ("num_stages", "num_features", "num_sent"),
    [(2, 2, 1 + 1), (4, 3, (1 + 2) + 1 + (1 + 1))],
    ids=["two stages", "four stages"],
)
def test_a_pipeline_whose_later_stages_add_features_is_planned(
    num_stages: int, num_features: int, num_sent: int, released: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stages of one block: the features that enter behind later blocks are sent like hidden states.

    In each microbatch, rank 0 sends the outputs of its stages, and the gradients of the inputs of its second stage.
    """
    family = f"deep{num_stages}"
    monkeypatch.setitem(FAMILIES, family, partial(_qwen3, num_features=num_features, num_hidden_layers=num_stages))
    interleaved = {"kind": "interleaved_1f1b", "stages_per_rank": 2}
    pipeline = {"pipeline": {"schedule": {"kind": "1f1b"} if num_stages == 2 else interleaved}}
    more: dict[str, Any] = {"mesh": {"pipeline_parallel": 2}, **pipeline}
    num_microbatches = num_stages // 2
    trainer = _trainer(released, family, **more, batch={"global_size": num_microbatches, "microbatch_size": 1})
    plan = trainer.plan_for(Launch(world_size=2, device="cpu"))
    (dry,) = dry_run(plan, ranks=[0], world_size=2)
    sent = [each.num_bytes for each in dry.forward_backward.collectives if each.name == "send"]
    assert len(sent) == num_microbatches * num_sent
    assert len(set(sent)) == 1
    assert plan_cluster(trainer, world_size=2, hardware="h100-dgx").memory[1].parameters > 0
