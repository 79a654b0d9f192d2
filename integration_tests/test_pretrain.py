"""The main job end to end: layouts, resume, export, and user errors."""

import importlib
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import EXAMPLES, TINY_MODEL, Ended, copy_run, curve, curve_rounding, on_ranks, options, records
from safetensors.torch import load_file

HYBRID = {"mesh.data_parallel_replicate": 2, "mesh.data_parallel_shard": 2}
MOE = str(EXAMPLES / "pretrain_moe.toml")


def _tiny(runs: Path, name: str, **more: Any) -> list[str]:
    return options(TINY_MODEL, {"run.folder": runs, "run.name": name, "logging.every": 1}, **more)


def _run(arguments: list[str], world_size: int = 1) -> Ended:
    ended = on_ranks("pretrain", arguments, world_size=world_size)
    assert [each.code for each in ended] == [0] * world_size, ended[0].errors
    return ended[0]


def _close(ours: list[float], theirs: list[float], *, rel: float) -> bool:
    return len(ours) == len(theirs) > 0 and ours == pytest.approx(theirs, rel=rel)


@pytest.mark.parametrize("microbatch_size", [1, 2])
@pytest.mark.parametrize("kind", ["dense", "moe"])
@pytest.mark.full
def test_four_ranks_have_the_curve_of_one_process(tmp_path: Path, kind: str, microbatch_size: int) -> None:
    file = [MOE] if kind == "moe" else []
    _run(file + _tiny(tmp_path, "one", steps=8, evaluation__every=4))
    _run(
        file
        + _tiny(tmp_path, "four", steps=8, evaluation__every=4, batch__microbatch_size=microbatch_size)
        + options(HYBRID),
        world_size=4,
    )
    # In float32 a rounding error can send a token to another expert; test_oracle.py compares that in float64.
    tolerance = 1e-3 if kind == "moe" else curve_rounding(20)
    for name in ("loss", "grad_norm", "perplexity", "evaluation_loss"):
        assert _close(curve(tmp_path / "four", name), curve(tmp_path / "one", name), rel=tolerance), name
    assert len(curve(tmp_path / "one", "loss")) == 8


def test_the_run_folder_and_the_last_line(tmp_path: Path) -> None:
    ended = _run(_tiny(tmp_path, "tiny", steps=6, checkpoint__every=3))
    run_dir = tmp_path / "tiny"
    summary = ended.summary
    assert summary["steps"] == 6
    assert summary["run_dir"] == str(run_dir)
    assert summary["export_dir"] == str(run_dir / "export")
    assert summary["train_loss"] == curve(run_dir, "loss")[-1]
    assert summary["val_bits_per_byte"] == pytest.approx(math.log2(curve(run_dir, "evaluation_perplexity")[-1]))
    assert summary["weight_per_second"] > 0
    assert json.loads((run_dir / "config.json").read_text())["model"]["hidden_size"] == 32
    assert (run_dir / "loss.png").read_bytes().startswith(b"\x89PNG")
    names = sorted(path.name for path in (run_dir / "checkpoints").iterdir())
    assert names == ["job.lock", "step-00000003", "step-00000006"]
    assert "def " in ended.output


@pytest.mark.full
def test_more_steps_continue_a_run(tmp_path: Path) -> None:
    _run(_tiny(tmp_path, "run", steps=4))
    before = records(tmp_path / "run")
    assert _run(_tiny(tmp_path, "run", steps=7)).summary["steps"] == 7
    after = records(tmp_path / "run")
    assert after[: len(before)] == before
    assert curve(tmp_path / "run", "step") == sorted(curve(tmp_path / "run", "step"))
    assert max(curve(tmp_path / "run", "step")) == 7


@pytest.mark.slow
def test_a_finished_run_is_not_trained_again(tmp_path: Path) -> None:
    first = _run(_tiny(tmp_path, "run", steps=4))
    before = records(tmp_path / "run")
    assert _run(_tiny(tmp_path, "run", steps=4)).summary == first.summary
    assert records(tmp_path / "run") == before


@pytest.mark.full
def test_a_run_continues_on_another_mesh(tmp_path: Path) -> None:
    _run(_tiny(tmp_path, "start", steps=4, lr_schedule__final_fraction=1.0))
    for name, ranks in (("one", 1), ("four", 4)):
        copy_run(tmp_path / "start", tmp_path / name)
        mesh = HYBRID if ranks == 4 else {}
        _run(_tiny(tmp_path, name, steps=8, lr_schedule__final_fraction=1.0) + options(mesh), world_size=ranks)
    for name in ("loss", "grad_norm"):
        assert _close(curve(tmp_path / "four", name), curve(tmp_path / "one", name), rel=curve_rounding(8)), name


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "tied"), [("dense", "true"), ("dense", "false"), ("moe", "true")])
@pytest.mark.sample("dense-false")
def test_transformers_loads_the_export_and_gives_the_same_logits(tmp_path: Path, kind: str, tied: str) -> None:
    import transformers

    file = [MOE] if kind == "moe" else []
    ended = _run(file + _tiny(tmp_path, "run", steps=3, model__tie_word_embeddings=tied))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(ended.summary["export_dir"], dtype=torch.float32).eval()
    assert type(theirs).__name__ == ("Qwen3MoeForCausalLM" if kind == "moe" else "Qwen3ForCausalLM")
    ours = _exported_model(tmp_path / "run", kind)
    tokens = torch.randint(0, 256, (2, 32), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-5, atol=1e-5)


def _exported_model(run_dir: Path, kind: str) -> torch.nn.Module:
    from d9d_dist import StageInfo  # noqa: PLC0415
    from d9d_state import load_model_state  # noqa: PLC0415

    pretrain = importlib.import_module("pretrain")
    config = pretrain.PretrainConfig.model_validate(json.loads((run_dir / "config.json").read_text()))
    provider = pretrain.Decoder(config.model, config.experts)
    model = provider.build(StageInfo())
    load_model_state(model, run_dir / "export", provider.state_mapper(model))
    return model


@pytest.mark.slow
def test_the_moe_job_learns(tmp_path: Path) -> None:
    _run([MOE, *_tiny(tmp_path, "moe", steps=40, optimizer__learning_rate="1e-2")])
    losses = curve(tmp_path / "moe", "loss")
    assert losses[-1] < losses[0] - 1.0
    names = load_file(tmp_path / "moe" / "export" / "model.safetensors").keys()
    assert any("experts.7" in name for name in names)


_MISTAKES = {
    "an unknown key": (
        ["--optimizer.learning_rat", "1"],
        "optimizer.learning_rat is not a configuration key; did you ",
    ),
    "a mistyped section": (["--modle.hidden_size", "1"], "modle is not a configuration key; did you mean model?"),
    "no number": (["--steps", "many"], "steps = 'many'; expected a valid integer"),
    "heads that do not divide": (
        ["--model.num_heads", "3", "--model.num_kv_heads", "2"],
        "num_kv_heads = 2 does not div",
    ),
    "a mesh of other ranks": (["--mesh.data_parallel_shard", "2"], "make 2 ranks, but the job has 1. Start 2 ranks"),
    "a batch that does not divide": (
        ["--batch.global_size", "10", "--batch.microbatch_size", "4"],
        "batch.global_size = 10 cannot be divided evenly over 1 data-parallel ranks x batch.microbatch_size = 4",
    ),
    "a missing data folder": (["--text.folder", "no/such"], "text.folder = no/such is not a folder; expected one"),
    "no length": (["--text.length", "0"], "text.length = '0'; expected a number greater than 0"),
    "files without text": (["--text.pattern", "*.none"], "has 0 files *.none; expected text in the training files"),
    "too few tokens": (
        ["--model.vocab_size", "100"],
        "model.vocab_size = 100; expected at least 256, one for each byte",
    ),
    "a decay above one": (["--optimizer.betas", "[0.9, 2]"], "optimizer.betas.1 = 2; expected a number less than 1"),
    "a run folder under a file": (
        ["--run.folder", "{file}"],
        "is a file, not a folder. Choose another folder with --run.f",
    ),
}


@pytest.mark.parametrize("mistake", _MISTAKES)
def test_a_user_error_gives_one_message_and_writes_no_files(tmp_path: Path, mistake: str) -> None:
    extra, message = _MISTAKES[mistake]
    (tmp_path / "file").touch()
    arguments = [word.format(file=tmp_path / "file" / "runs") for word in extra]
    ended = on_ranks("pretrain", _tiny(tmp_path, "run", steps=2) + arguments)[0]
    assert ended.code == 2
    assert ended.errors.startswith("d9d: ")
    assert message in ended.errors
    assert "Traceback" not in ended.errors
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]


def test_an_expert_parallel_degree_without_experts_is_refused(tmp_path: Path) -> None:
    degrees = ["--mesh.data_parallel_shard", "2", "--mesh.expert_parallel", "2"]
    for ended in on_ranks("pretrain", _tiny(tmp_path, "run", steps=2) + degrees, world_size=2):
        assert ended.code == 2
        assert "mesh.expert_parallel = 2, but no experts are sharded; expected a model with experts" in ended.errors


def test_a_data_folder_without_text_is_refused(tmp_path: Path) -> None:
    arguments = _tiny(tmp_path, "run", steps=2, text__folder=tmp_path / "empty")
    for files, found in (([], "has 0 files json/*.py"), (["a.py"], "has 1 files json/*.py")):
        (tmp_path / "empty" / "json").mkdir(parents=True, exist_ok=True)
        for name in files:
            (tmp_path / "empty" / "json" / name).write_text("x = 1\n")
        (ended,) = on_ranks("pretrain", arguments)
        assert (ended.code, found in ended.errors) == (2, True)
        assert "expected text in the training files and in the held-out tenth of the files" in ended.errors
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty"]


def test_rows_are_packed_documents(tmp_path: Path) -> None:
    """Every byte except the first of each part is a label once, and is predicted only from its own file."""
    source_text = importlib.import_module("source_text")
    texts = {f"{number}.py": bytes(range(number, number + 3 + 5 * number)) for number in range(1, 40)}
    for name, text in texts.items():
        (tmp_path / name).write_bytes(text)
    data = source_text.PackedText(source_text.Text(folder=tmp_path, length=32, tokens=tmp_path / "tokens"))
    held_out, predicted = data.evaluation(), []
    for row in map(held_out.read, held_out.cursor().take(1000)):
        for number in row["documents"].unique():
            here = (row["documents"] == number) & (row["labels"] != -100)
            assert torch.equal(row["position_ids"][here], torch.arange(int(here.sum())))
            assert torch.equal(row["labels"][here], row["input_ids"][here] + 1)  # bytes of a file are consecutive
            predicted += row["labels"][here].tolist()
    _, chosen = source_text.read_text(source_text.Text(folder=tmp_path))
    assert sorted(predicted) == sorted(byte for text in chosen for byte in text[1:])
    assert 0 < len(chosen) < len(texts) / 2


@pytest.mark.full
def test_a_preset_gives_the_losses_of_the_script(tmp_path: Path) -> None:
    """`d9d-train` with the preset has the curve of the script, and counts bytes without padding."""
    settings = {"run.folder": tmp_path, "logging.every": 1, "steps": 4, "evaluation.every": 2}
    _run(_tiny(tmp_path, "script", steps=4, evaluation__every=2))
    places = {"model": "model.params", "text": "dataset.text"}
    tiny = {
        f"{places.get(head := key.split('.')[0], head)}{key[len(head) :]}": value for key, value in TINY_MODEL.items()
    }
    preset = [str(EXAMPLES / "pretrain_preset.toml"), *options(tiny, settings, {"run.name": "preset"})]
    (ended,) = on_ranks("d9d_loop.__main__", preset)
    assert ended.code == 0, ended.errors
    assert "TrainResult(steps=4" in ended.output
    for name in ("loss", "grad_norm", "evaluation_perplexity"):
        assert curve(tmp_path / "preset", name) == curve(tmp_path / "script", name) != [], name
    assert (tmp_path / "preset" / "loss.png").exists()


@pytest.mark.full
def test_resuming_from_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    _run(_tiny(tmp_path, "run", steps=2))
    before = {path: path.read_bytes() for path in sorted((tmp_path / "run").rglob("*")) if path.is_file()}
    (ended,) = on_ranks("pretrain", [*_tiny(tmp_path, "run", steps=2), "--model.num_layers", "3"])
    assert ended.code == 2
    assert "is a checkpoint of a different model:" in ended.errors
    assert "the model has backbone.layers.2.attention.q_proj.weight, the checkpoint does not" in ended.errors
    assert before == {path: path.read_bytes() for path in sorted((tmp_path / "run").rglob("*")) if path.is_file()}
