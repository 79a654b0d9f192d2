"""Fine-tuning the model that the main job exported: equal on any number of ranks, readable by peft and transformers."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import TINY_MODEL, copy_run, curve, curve_rounding, on_ranks, options, records

STAGES = {"mesh.pipeline_parallel": 2, "mesh.data_parallel_shard": 2, "batch.microbatch_size": 2}


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs = tmp_path_factory.mktemp("runs")
    (ended,) = on_ranks("pretrain", options(TINY_MODEL, {"run.folder": runs, "steps": 5}))
    return Path(ended.summary["export_dir"])


def _finetune(runs: Path, name: str, pretrained: Path, more: dict[str, Any], world_size: int) -> dict[str, str]:
    text = {key: value for key, value in TINY_MODEL.items() if not key.startswith("model.")}
    job = {"run.folder": runs, "run.name": name, "initial_weights": pretrained, "steps": 10, "logging.every": 1}
    ended = on_ranks("finetune_lora", options(text, job, more), world_size=world_size)
    assert ended[0].code == 0, ended[0].errors
    return ended[0].summary


@pytest.mark.full
def test_losses_equal_on_four_ranks_and_peft_and_transformers_load_the_result(tmp_path: Path, pretrained: Path) -> None:
    import peft
    import transformers

    one = _finetune(tmp_path, "one", pretrained, {}, 1)
    _finetune(tmp_path, "four", pretrained, STAGES, 4)
    for name in ("loss", "grad_norm", "evaluation_loss"):
        ours, theirs = curve(tmp_path / "four", name), curve(tmp_path / "one", name)
        assert ours == pytest.approx(theirs, rel=curve_rounding(10)), name
    losses = curve(tmp_path / "one", "loss")
    assert len(losses) == 10
    assert losses[-1] < losses[0]

    load = transformers.AutoModelForCausalLM.from_pretrained
    base, merged = load(pretrained, dtype=torch.float32), load(one["export_dir"], dtype=torch.float32)
    tokens = torch.randint(0, 256, (2, 32), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        before = base.eval()(tokens).logits
        adapted = peft.PeftModel.from_pretrained(base, one["adapters_dir"]).eval()(tokens).logits
        after = merged.eval()(tokens).logits
    torch.testing.assert_close(adapted, after, rtol=1e-5, atol=1e-5)
    assert (after - before).abs().max() > 1e-4


@pytest.mark.slow
def test_a_job_resumes_bitwise_from_a_checkpoint_of_only_adapters(tmp_path: Path, pretrained: Path) -> None:
    adapters_only = {"checkpoint.trainable_only": "true", "checkpoint.every": 5, "checkpoint.background": "false"}
    _finetune(tmp_path, "run", pretrained, adapters_only, 1)
    checkpoints = tmp_path / "run" / "checkpoints"
    manifest = json.loads((checkpoints / "step-00000010" / "manifest.json").read_text())
    assert all("lora_" in name for name in manifest["tensors"])
    assert any(name.startswith("optimizer.") for name in manifest["tensors"])
    written, adapters, model = (
        sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        for folder in (checkpoints / "step-00000010", tmp_path / "run" / "adapters", pretrained)
    )
    assert written < 0.7 * (model + 3 * adapters)  # factors A and B, each with two moments

    again = copy_run(tmp_path / "run", tmp_path / "again")
    shutil.rmtree(again / "checkpoints" / "step-00000010")
    _finetune(tmp_path, "again", pretrained, adapters_only, 1)
    assert records(again) == records(tmp_path / "run")
    for folder in ("adapters/adapter_model.safetensors", "export/model.safetensors"):
        assert (again / folder).read_bytes() == (tmp_path / "run" / folder).read_bytes()


def test_without_a_pretrained_model_the_error_names_the_script_to_run(tmp_path: Path) -> None:
    (ended,) = on_ranks("finetune_lora", options({"initial_weights": tmp_path / "none", "run.folder": tmp_path}))
    assert ended.code == 2
    assert ended.errors.endswith("none does not exist; run examples/pretrain.py first.\n")
