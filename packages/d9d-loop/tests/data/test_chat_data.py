import json
from pathlib import Path
from typing import Any, Literal

import pytest

pytest.importorskip("jinja2", reason="needs the extra chat")
pytest.importorskip("tokenizers", reason="needs the extra chat")

from chat_examples import CHATML, byte_tokenizer, chat_tokenizer, chats

from d9d_dist import UserError
from d9d_loop.data import ChatData, TokenFile, read_chat_tokenizer, read_conversation
from d9d_loop.data.__main__ import main

PAIRS = [{"prompt": f"ask {n}", "chosen": f"good {n}", "rejected": "bad"} for n in range(5)]


def _folder(path: Path) -> Path:
    """Write the folder of a chat model, without weights."""
    path.mkdir()
    byte_tokenizer("<|im_start|>", "<|im_end|>").save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHATML}), encoding="utf-8")
    return path


def _lines(path: Path, samples: list[dict[str, Any]]) -> Path:
    path.write_text("\n".join(map(json.dumps, samples)), encoding="utf-8")
    return path


def test_rows_from_files_equal_rows_from_samples_and_a_tokenizer(tmp_path: Path) -> None:
    path, folder = _lines(tmp_path / "chats.jsonl", chats(9)), _folder(tmp_path / "model")
    from_files = ChatData(str(path), held_out=[path], tokenizer=folder, row_length=300)
    from_objects = ChatData(chats(9), tokenizer=chat_tokenizer(), row_length=300)
    one, other = (data.training(seed=3) for data in (from_files, from_objects))
    assert one.cursor().take(7) == other.cursor().take(7)
    assert from_objects.evaluation() is None
    held_out = from_files.evaluation()
    assert held_out is not None
    assert not held_out.is_endless
    assert sum(len(entry) for entry in held_out.cursor().take(100)) == 9


@pytest.mark.parametrize(("kind", "last"), [("pairs", "d"), ("scored_pairs", "<|im_end|>")])
def test_the_last_token_of_a_pair_is_an_input_only_for_scored_pairs(
    kind: Literal["pairs", "scored_pairs"], last: str
) -> None:
    stream = ChatData(PAIRS, tokenizer=chat_tokenizer(), row_length=200, kind=kind).training(seed=0)
    row = stream.read(stream.cursor().take(1)[0])
    rejected = row["input_ids"][row["documents"] == 1]
    token = byte_tokenizer("<|im_start|>", "<|im_end|>").id_to_token(int(rejected[-1]))
    assert token == last


def test_the_command_writes_and_shows_masks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    samples = [*chats(5), {"prompt": "a" * 300, "completion": "b"}]
    path, folder = _lines(tmp_path / "chats.jsonl", samples), _folder(tmp_path / "model")
    options = [str(path), "--chat", "--tokenizer", str(folder)]
    main([*options, "--show", "2"])
    shown = capsys.readouterr().out
    assert shown.count("--- conversation") == 2
    assert "assistant\n⟦answer 0 <|im_end|>⟧" in shown
    main([*options, "--output", str(tmp_path / "tokens"), "--max-length", "200", "--too-long", "drop"])
    summary = json.loads(capsys.readouterr().out)
    assert (summary["documents"], summary["dropped"]) == (5, 1)
    assert TokenFile(tmp_path / "tokens").has_masks
    with pytest.raises(UserError, match=r"conversation 5: a conversation has 3.. positions"):
        main([*options, "--output", str(tmp_path / "other"), "--max-length", "200"])


def test_the_command_holds_out_conversations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    samples = [{**sample, "id": number} for number, sample in enumerate([*chats(20), *chats(20)])]
    path, folder = _lines(tmp_path / "chats.jsonl", samples), _folder(tmp_path / "model")
    main([str(path), "--chat", f"--tokenizer={folder}", f"--output={tmp_path / 't'}", "--held-out=0.3"])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [Path(line["folder"]) for line in lines] == [tmp_path / "t" / "train", tmp_path / "t" / "held_out"]
    files = [TokenFile(line["folder"]) for line in lines]
    train, held_out = ([tuple(file[n]["tokens"].tolist()) for n in range(len(file))] for file in files)
    assert not set(train) & set(held_out), "duplicates are in the same part"
    tokenizer = read_chat_tokenizer(folder)
    expected = [tuple(tokenizer(read_conversation(sample)).tokens) for sample in samples]
    assert sorted([*train, *held_out]) == sorted(expected)
    assert 2 <= len(held_out) <= 22
    _lines(path, [*samples, {"messages": 3}])
    with pytest.raises(UserError, match=r"chats\.jsonl, line 41: "):
        main([str(path), "--chat", f"--tokenizer={folder}", f"--output={tmp_path / 'u'}", "--held-out=0.3"])


def test_the_command_needs_an_output_or_something_to_show(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        main([str(tmp_path), "--chat", "--tokenizer", str(tmp_path)])


@pytest.mark.parametrize("options", [{"kind": "pair"}, {"too_long": "Truncate"}])
def test_unknown_options_are_errors(options: dict[str, Any]) -> None:
    ((name, value),) = options.items()
    with pytest.raises(UserError, match=f"{name} = '{value}'; expected one of "):
        ChatData(chats(2), tokenizer=chat_tokenizer(), row_length=300, **options).training(seed=0)
