"""The command d9d-plan on files of jobs on text, and its column of unsharded gradients."""

import json
from pathlib import Path
from typing import Any

import pytest
from text_job_cases import GROUPED, IDS, save_folder, write_lines

from d9d_loop.jobs import write_starter
from d9d_loop.planning.__main__ import main

SMALL = ["--batch.global_size", "16", "--dataset.length", "64", "--world-size", "4", "--hardware", "h100-dgx", "--json"]


def plan(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    main([*words, *SMALL])
    return json.loads(capsys.readouterr().out)


def test_the_starter_of_pretraining_keeps_unsharded_gradients_until_the_last_microbatch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_lines(Path("corpus.jsonl"), [{"text": "yes " * 40} for _ in range(40)])
    write_starter("pretrain", tmp_path)
    words = ("pretrain.toml", "--model.num_hidden_layers", "2")
    (kept,) = plan(capsys, *words)["memory"]
    (reduced,) = plan(capsys, *words, "--gradients.reduce_each_microbatch", "true")["memory"]
    # Each of four ranks has a quarter of each gradient, and until the last microbatch the other three quarters.
    assert kept["unsharded_gradients"] == pytest.approx(3 * kept["gradients"], rel=0.01)
    assert reduced["unsharded_gradients"] == 0
    assert reduced["activations"] < kept["activations"] + kept["unsharded_gradients"]


@pytest.mark.slow("dense")
@pytest.mark.parametrize("base", ["dense", pytest.param("nf4", marks=pytest.mark.full)])
def test_the_starter_of_sft_with_adapters_is_planned(
    base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import transformers

    pytest.importorskip("d9d_peft")
    monkeypatch.chdir(tmp_path)
    save_folder(Path("Qwen3-0.6B"), transformers.Qwen3Config(**IDS, **GROUPED), "Qwen3ForCausalLM")
    template = "{% for m in messages %}<s>{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<s>{% endif %}"
    (tmp_path / "Qwen3-0.6B" / "chat_template.jinja").write_text(template)
    write_lines(Path("chats.jsonl"), [{"prompt": "1?", "completion": "yes"} for _ in range(40)])
    write_starter("sft", tmp_path)
    found = plan(capsys, "sft.toml", "--adapter.base", base, "--adapter.block_size", "8")
    assert found["fits"]
