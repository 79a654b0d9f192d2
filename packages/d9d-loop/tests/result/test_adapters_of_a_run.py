"""Commands on a run that has only adapters: its model is that of `peft` on the same base."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from text_job_cases import GROUPED, IDS, job_config, labeled, save_folder, train, write_lines

from d9d_dist import UserError
from d9d_dist.testing import assert_rounds_like, in_float64
from d9d_loop.result import adapted_base, load_result
from d9d_loop.result import chat as chat_command
from d9d_loop.result import evaluate as eval_command
from d9d_loop.result import export_adapters as export_command

CPU = torch.device("cpu")
IDS_L = torch.arange(3, 15)[None]
NF4 = {"rank": 4, "alpha": 8.0, "base": "nf4", "block_size": 8}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a base in bfloat16, a QLoRA run of two steps on it and a text."""
    import transformers

    pytest.importorskip("d9d_peft")
    root = tmp_path_factory.mktemp("qlora")
    config = transformers.Qwen3Config(**IDS, **GROUPED, tie_word_embeddings=False, dtype="bfloat16")
    save_folder(root / "base", config, "Qwen3ForCausalLM", dtype=torch.bfloat16)
    texts = write_lines(root / "texts.jsonl", [{"text": f"{n} plus {n} is {2 * n}"} for n in range(40)])
    train(job_config("pretrain", {"folder": root / "base"}, texts, root / "runs", adapter=NF4, steps=2))
    return root


def peer_of(root: Path, *, dense: bool = False) -> Any:
    """Return the model of `peft` with merged adapters, in float32."""
    import transformers

    blocks, peft = pytest.importorskip("d9d_peft.block_format"), pytest.importorskip("peft")
    base = transformers.AutoModelForCausalLM.from_pretrained(root / "base", dtype=torch.float32)
    for name, weight in base.named_parameters():
        if name.endswith("_proj.weight") and not dense:
            codes = blocks.quantize_blocks(weight.data, "nf4", 8)
            weight.data = blocks.dequantize_blocks(*codes, "nf4", dtype=torch.float32)
    return peft.PeftModel.from_pretrained(base, root / "runs" / "pretrain" / "adapters").merge_and_unload().eval()


@pytest.mark.parametrize("weights", ["trained", "dense"])
def test_an_export_is_the_merged_model_of_peft(
    trained: Path, tmp_path: Path, weights: str, capsys: pytest.CaptureFixture[str]
) -> None:
    import transformers

    run = trained / "runs" / "pretrain"
    export_command.main([str(run), "--output", str(tmp_path / "out"), "--base-weights", weights])
    names = {"trained": "weights dequantized from nf4 of", "dense": "weights of"}
    assert f"adapters of {run / 'adapters'} on the {names[weights]} {trained / 'base'}" in capsys.readouterr().out
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    peer = peer_of(trained, dense=weights == "dense").state_dict()
    assert merged.state_dict().keys() == peer.keys()
    for name, weight in merged.state_dict().items():
        assert weight.dtype == torch.bfloat16
        torch.testing.assert_close(weight, peer[name].bfloat16(), rtol=0, atol=0)
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer("ab").input_ids[0] == IDS["bos_token_id"]
    with pytest.raises(UserError, match="out exists; expected a new folder"):
        export_command.main([str(run), "--output", str(tmp_path / "out")])


def test_adapters_are_not_merged_into_other_weights_than_those_of_the_training(trained: Path, tmp_path: Path) -> None:
    """Also not those of another shard than the first."""
    import transformers

    config = transformers.Qwen3Config(**IDS, **GROUPED, tie_word_embeddings=False)
    base = save_folder(tmp_path / "base", config, "Qwen3ForCausalLM")
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    model.save_pretrained(base, max_shard_size="20KB")
    shards = sorted(base.glob("*-of-*.safetensors"))
    assert len(shards) > 1
    (base / "model.safetensors").unlink()
    run = train(job_config("pretrain", {"folder": base}, trained / "texts.jsonl", tmp_path, adapter=NF4, steps=1))
    before = shards[-1].read_bytes()
    shards[-1].write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
    text = ["--data", str(trained / "texts.jsonl")]
    for command, options in ((export_command, []), (chat_command, ["--prompt", "1"]), (eval_command, text)):
        message = f"the base weights in {base} have changed since the training of {run / 'adapters'}; expected those"
        with pytest.raises(UserError, match=message):
            command.main([str(run), *options])
    assert not (run / "export").exists()
    export_command.main([str(run), "--base", str(base), "--output", str(tmp_path / "other")])
    shards[-1].write_bytes(before)
    export_command.main([str(run)])
    files = [(folder / "model.safetensors").read_bytes() for folder in (tmp_path / "other", run / "export")]
    assert files[0] != files[1]


@pytest.mark.parametrize("name", ["config.json", "adapters/adapter_config.json"])
def test_a_damaged_file_of_a_run_is_not_an_absent_one(name: str, trained: Path, tmp_path: Path) -> None:
    """Without the configuration of the run, its adapters would be merged into the dense weights."""
    run = shutil.copytree(trained / "runs" / "pretrain", tmp_path / "run")
    for text in ('{"a": ', "[]"):
        (run / name).write_text(text)
        with pytest.raises(UserError, match=rf"{name} is damaged; expected a JSON object"):
            export_command.main([str(run), "--output", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("path", "has_peft"), [("runs/pretrain", True), ("runs/pretrain/adapters", False)])
def test_a_run_with_only_adapters_is_evaluated_as_it_was_trained(
    trained: Path, path: str, has_peft: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if not has_peft:
        monkeypatch.setattr(adapted_base, "find_spec", lambda name: None)
    model = load_result(trained / path, device=CPU).model.float()
    peer = peer_of(trained)
    with torch.no_grad():  # the base of the command is rounded to the dtype of its files
        assert (model(IDS_L).logits - peer(IDS_L).logits).abs().max() < 2**-7 * peer(IDS_L).logits.abs().max()
    eval_command.main([str(trained / path), "--data", str(trained / "texts.jsonl")])
    assert "weights dequantized from nf4" in json.loads(capsys.readouterr().out)["model"]
    chat_command.main([str(trained / path), "--prompt", "1 plus", "--max-new-tokens", "3"])
    assert capsys.readouterr().out.startswith("1 plus")


@pytest.mark.parametrize("kind", ["lora", pytest.param("dora", marks=pytest.mark.full)])
def test_without_peft_a_dense_base_gives_the_merged_export_of_the_run(
    kind: str, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    config = transformers.Qwen3Config(**IDS, **GROUPED, tie_word_embeddings=False)
    base = save_folder(tmp_path / "base", config, "Qwen3ForCausalLM")
    adapter = {"kind": kind, "rank": 4, "alpha": 8.0}
    run = train(job_config("pretrain", {"folder": base}, trained / "texts.jsonl", tmp_path, adapter=adapter))
    assert load_result(run, device=CPU).adapted is None  # the export is used
    monkeypatch.setattr(adapted_base, "find_spec", lambda name: None)
    export_command.main([str(run / "adapters"), "--output", str(tmp_path / "out")])
    load = transformers.AutoModelForCausalLM.from_pretrained
    found, own = load(tmp_path / "out"), load(run / "export")
    assert_rounds_like(
        [found(IDS_L).logits.detach()], [in_float64(own, IDS_L).logits], peer=[own(IDS_L).logits.detach()]
    )


@pytest.mark.parametrize("adapted", [True, False])
@pytest.mark.slow("True")
def test_a_checkpoint_of_a_run_is_exported(adapted: bool, trained: Path, tmp_path: Path) -> None:
    import transformers

    config = transformers.Qwen3Config(**IDS, **GROUPED, tie_word_embeddings=False)
    base = save_folder(tmp_path / "base", config, "Qwen3ForCausalLM")
    options = {"adapter": {"rank": 4, "alpha": 8.0}} if adapted else {}
    texts = shutil.copy(trained / "texts.jsonl", tmp_path)
    job = job_config("pretrain", {"folder": base}, Path(texts), tmp_path, steps=2, **options)
    run = train(job.model_copy(update={"checkpoint": job.checkpoint.model_copy(update={"every": 1})}))
    moved = run.rename(tmp_path / "moved")
    Path(texts).unlink()
    for step in (1, 2):
        export_command.main([str(moved), "--step", str(step)])
    exports = [moved / "step-1" / "export", moved / "step-2" / "export", moved / "export"]
    first, second, last = ((each / "model.safetensors").read_bytes() for each in exports)
    assert first != second == last
    files = sorted(path.name for path in (moved / "export").iterdir())
    assert sorted(path.name for path in exports[0].iterdir()) == files
    with pytest.raises(
        UserError, match="there is no checkpoint of step 5; expected one of the steps that are kept: 2, 1"
    ):
        export_command.main([str(moved), "--step", "5"])
    with pytest.raises(UserError, match="--step last; expected the number of a step, or best"):
        export_command.main([str(moved), "--step", "last"])
    (moved / "config.json").write_text("{}")
    with pytest.raises(
        UserError, match=r"is not a run of d9d-train, .* call Trainer.export\(folder, step=...\) in the script"
    ):
        export_command.main([str(moved), "--step", "1"])


def test_a_new_head_is_part_of_the_export(trained: Path, tmp_path: Path) -> None:
    import transformers

    data = labeled(tmp_path / "labeled.jsonl", ["bad", "fine", "good"])
    run = train(job_config("classify", {"folder": trained / "base"}, data, tmp_path, adapter=NF4))
    export_command.main([str(run)])
    model = transformers.AutoModelForSequenceClassification.from_pretrained(run / "export")
    assert model.config.id2label == {0: "bad", 1: "fine", 2: "good"}
    with pytest.raises(UserError, match="holds a Qwen3ForSequenceClassification, which predicts no tokens"):
        load_result(run, device=CPU)


def test_a_missing_base_is_named(trained: Path, tmp_path: Path) -> None:
    adapters = shutil.copytree(trained / "runs" / "pretrain" / "adapters", tmp_path / "copied" / "adapters")
    named = json.loads((adapters / "adapter_config.json").read_text())
    assert named["base_model_name_or_path"] == str(trained / "base")
    assert "on the weights of" in str(load_result(adapters, device=CPU).adapted)  # no run says that it was quantized
    (adapters / "adapter_config.json").write_text(json.dumps({**named, "base_model_name_or_path": "Qwen/Qwen3-0.6B"}))
    with pytest.raises(UserError, match=r"base model is missing: Qwen/Qwen3-0\.6B is not a folder .* --base FOLDER"):
        load_result(adapters, device=CPU)
    assert str(trained / "base") in str(load_result(adapters, device=CPU, base=trained / "base").adapted)
    with pytest.raises(UserError, match="names no quantized format of the base"):
        load_result(adapters, device=CPU, base=trained / "base", weights="dequantized")
    with pytest.raises(UserError, match="base is a whole model; expected adapters to merge"):
        export_command.main([str(trained / "base")])
