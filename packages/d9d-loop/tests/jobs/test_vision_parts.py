"""Frozen and adapted parts of vision-language models: memory of a frozen tower, and each kind of adapter."""

import re
from collections.abc import Generator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from vision_cases import CHATS, plain_inputs, save_chats, save_model, vision_config

from d9d_dist.testing import run_ranks
from d9d_loop import Engine, EngineConfig, hugging_face_model
from d9d_loop.jobs import NextToken, image_chats, text_trainer
from d9d_loop.result import load_result
from d9d_metrics import read_metrics

PARTS = {
    "tower": (r"\.visual\.(patch_embed|blocks)", 0.1),
    "projector": (r"\.visual\.merger", 0.2),
    "language model": ("language_model|lm_head", 0.4),
}
"""Patterns of the names of each part, and its learning rate."""


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("released")
    return save_model("qwen2_5_vl", root / "model"), save_chats(root, CHATS)


def _model(folder: Path) -> Any:
    transformers: Any = import_module("transformers")
    return hugging_face_model(folder, transformers.AutoModelForImageTextToText, dtype=torch.float64)


@contextmanager
def _count_saved(part: nn.Module) -> Generator[dict[bool, int]]:
    """Count the elements of tensors that forward passes save for backward, inside of a part (True) and elsewhere."""
    counts, inside = {True: 0, False: 0}, [False]

    def pack(saved: torch.Tensor) -> torch.Tensor:
        counts[inside[0]] += saved.numel()
        return saved

    def enter(*_: Any) -> None:
        inside[0] = True

    def leave(*_: Any) -> None:
        inside[0] = False

    handles = [part.register_forward_pre_hook(enter), part.register_forward_hook(leave)]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        yield counts
    for handle in handles:
        handle.remove()


def _saved(model: Path, file: Path, runs: Path, freeze: list[str], mesh: dict[str, int]) -> tuple[int, int]:
    """Return the elements saved in the tower and elsewhere; check that frozen parameters have no other memory."""
    data = image_chats(vision_config(model, file, runs))
    batch = data.collate([data.samples[0], data.samples[1]])
    values = {"mesh": mesh, "run": {"folder": runs}, "freeze": freeze, "optimizer": {"learning_rate": 0.1}}
    with Engine.open(EngineConfig.model_validate(values), model=_model(model), task=NextToken()) as engine:
        tower: Any = next(each for name, each in engine.model.named_modules() if name.endswith("visual"))
        with _count_saved(tower) as counts:
            engine.forward_backward([batch], NextToken().loss)
        engine.step()
        is_frozen = [not each.requires_grad for each in tower.parameters()]
        assert all(is_frozen) == bool(freeze)
        assert not any(each.grad is not None or each in engine.optimizer.state for each in tower.parameters() if freeze)
    return counts[True], counts[False]


@pytest.mark.slow("fsdp")
@pytest.mark.parametrize("mesh", [{}, {"data_parallel_shard": 2}], ids=["one", "fsdp"])
def test_a_frozen_tower_saves_no_activations_gradients_or_optimizer_state(
    mesh: dict[str, int], released: tuple[Path, Path], tmp_path: Path
) -> None:
    runs = []
    for freeze in ([], [r"\.visual\."]):
        arguments = (*released, tmp_path, freeze, mesh)
        runs.append(run_ranks(_saved, *arguments, world_size=2)[0] if mesh else _saved(*arguments))
    (trained, rest), (frozen, rest_of_frozen) = runs
    assert frozen == 0 < trained
    assert 0 < rest_of_frozen <= rest


def _losses(run: Path) -> list[float]:
    return [each["loss"] for each in read_metrics(run / "metrics.jsonl") if "loss" in each]


def _first_loss(model: Any, folder: Path, file: Path) -> float:
    """Return the mean loss of the labels of the first four chats."""
    transformers: Any = import_module("transformers")
    processor = transformers.AutoProcessor.from_pretrained(folder)
    total = count = 0.0
    for chat in CHATS[:4]:
        inputs, labels = plain_inputs(processor, chat, file.parent)
        with torch.no_grad():
            logits = model(**inputs, use_cache=False).logits[:, :-1].flatten(0, 1)
        total += nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum").item()
        count += int((labels[:, 1:] != -100).sum())
    return total / count


@pytest.mark.slow("int8")
@pytest.mark.parametrize(
    "adapter",
    [{"kind": "dora"}, {"base": "nf4", "block_size": 16}, {"base": "int8", "block_size": 16}],
    ids=["dora", "nf4", "int8"],
)
def test_each_kind_of_adapter_leaves_the_tower_as_it_is(
    adapter: dict[str, Any], released: tuple[Path, Path], tmp_path: Path
) -> None:
    pytest.importorskip("d9d_peft")
    transformers: Any = import_module("transformers")
    model, file = released
    chosen = {"target": "language_model.*_proj$", "rank": 2, "alpha": 4.0, **adapter}
    run = text_trainer(vision_config(model, file, tmp_path, adapter=chosen)).train().run_dir
    losses = _losses(run)
    base = transformers.AutoModelForImageTextToText.from_pretrained(model)
    modules = {name for name, _ in base.named_modules()}
    names = load_file(run / "adapters" / "adapter_model.safetensors")
    adapted = {name.removeprefix("base_model.model.").partition(".lora_")[0] for name in names}
    assert adapted <= modules  # the names that peft loads
    assert all("language_model" in name for name in adapted)
    if "base" in adapter:  # the language model is quantized, the tower is not
        whole = load_result(run, device=torch.device("cpu"), weights="dequantized").model
        tower = {name: each for name, each in base.state_dict().items() if "visual" in name}
        assert tower
        assert all(whole.state_dict()[name].equal(each) for name, each in tower.items())
        assert losses[0] != pytest.approx(_first_loss(base, model, file), rel=1e-6)
        assert losses[0] == pytest.approx(_first_loss(base, model, file), rel=0.1)
    else:
        assert losses[0] == pytest.approx(_first_loss(base, model, file), rel=1e-5)
    assert losses[1] != losses[0]


def test_each_part_has_its_learning_rate(released: tuple[Path, Path], tmp_path: Path) -> None:
    transformers: Any = import_module("transformers")
    model, file = released
    sgd = {"kind": "sgd", "momentum": 0.0, "weight_decay": 0.0}
    groups = [{"pattern": pattern, "learning_rate": rate} for pattern, rate in PARTS.values()]
    auto: Any = transformers.AutoModelForImageTextToText
    found = {}
    for name, optimizer in {
        "equal": {**sgd, "learning_rate": 1.0},
        "parts": {**sgd, "learning_rate": 1.0, "groups": groups},
    }.items():
        run = text_trainer(vision_config(model, file, tmp_path / name, steps=1, optimizer=optimizer)).train().run_dir
        before, after = (auto.from_pretrained(each).state_dict() for each in (model, run / "export"))
        found[name] = {key: after[key].double() - each.double() for key, each in before.items()}
    for key, change in found["equal"].items():
        (rate,) = [rate for pattern, rate in PARTS.values() if re.search(pattern, key)]
        torch.testing.assert_close(found["parts"][key], change * rate, rtol=2e-3, atol=2e-7)
