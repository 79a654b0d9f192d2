"""The commands d9d-chat and d9d-eval, on small models of `transformers`."""

import io
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from d9d_dist import UserError
from d9d_dist.testing import assert_rounds_like, in_float64
from d9d_loop.data import TextTokenizer
from d9d_loop.result import LoadedResult, load_result
from d9d_loop.result import chat as chat_command
from d9d_loop.result import evaluate as eval_command
from d9d_loop.result.loaded_result import find_export

CPU = torch.device("cpu")
WORDS = ["<end>", "<user>", "<answer>", "to", "be", "or", "not"]
TEMPLATE = (
    "{% for m in messages %}{{ '<user> ' if m.role == 'user' else '<answer> ' }}{{ m.content }} {% endfor %}"
    "{% if add_generation_prompt %}<answer> {% endif %}"
)


def save_model(folder: Path, *, vocab_size: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        initializer_range=0.4, max_position_embeddings=32, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(folder)
    return model


def save_tokenizer(folder: Path, *, template: str | None, special: list[str] | None = None) -> None:
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<end>"))  # noqa: S106
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")  # noqa: S106
    fast.add_special_tokens({"additional_special_tokens": special or []})
    fast.chat_template = template
    fast.save_pretrained(folder)


@pytest.fixture
def byte_run(tmp_path: Path) -> Path:
    """Return a run folder whose export is a model of bytes."""
    save_model(tmp_path / "export", vocab_size=256)
    return tmp_path


@pytest.fixture
def chat_folder(tmp_path: Path) -> Path:
    save_model(tmp_path, vocab_size=len(WORDS))
    save_tokenizer(tmp_path, template=TEMPLATE)
    return tmp_path


def _answer(result: LoadedResult, prompt: list[int], **options: Any) -> list[int]:
    """Return the tokens of an answer, which have been streamed one by one."""
    seen: list[list[int]] = []
    tokens = chat_command.answer_tokens(result, prompt, on_tokens=lambda each: seen.append(list(each)), **options)
    assert seen == [tokens[: end + 1] for end in range(len(tokens))]
    return tokens


def test_streamed_tokens_equal_generate_of_transformers(byte_run: Path) -> None:
    result = load_result(byte_run, device=CPU)
    assert result.tokenizer.encode("to be") == list(b"to be")
    prompt = result.tokenizer.encode("to be")
    tokens = _answer(result, prompt, max_new_tokens=10, temperature=0)
    expected = result.model.generate(torch.tensor([prompt]), max_new_tokens=10, do_sample=False, pad_token_id=0)
    assert tokens == expected[0, 5:].tolist()


def _sampled(folder: Path, settings: dict[str, Any], num_answers: int = 2, **options: Any) -> list[list[int]]:
    """Return answers of a model with some settings in its generation_config.json."""
    (folder / "export/generation_config.json").write_text(json.dumps(settings))
    result = load_result(folder, device=CPU)
    torch.manual_seed(0)
    return [_answer(result, list(b"to be"), max_new_tokens=12, **options) for _ in range(num_answers)]


def test_the_settings_of_generation_config_are_used(byte_run: Path) -> None:
    """Each of them changes the answers; a model that draws each token from five repeats one."""
    greedy = _sampled(byte_run, {"do_sample": False})
    assert len(set(map(tuple, greedy))) == 1
    assert _sampled(byte_run, {"do_sample": False, "prompt_lookup_num_tokens": 3}) == greedy  # several tokens at once
    assert _sampled(byte_run, {"do_sample": True, "top_k": 1}) == greedy
    assert _sampled(byte_run, {"top_p": 1e-6, "temperature": 0.5}) == greedy
    assert _sampled(byte_run, {"top_p": 1e-6}) == greedy
    assert _sampled(byte_run, {"top_k": 1}) == greedy
    assert _sampled(byte_run, {"do_sample": True, "temperature": 0.0}) == greedy
    assert _sampled(byte_run, {"do_sample": False}, top_p=1e-6) == greedy
    assert _sampled(byte_run, {"do_sample": False}, top_p=1.0) != greedy
    assert _sampled(byte_run, {"do_sample": True, "num_return_sequences": 2}, temperature=0) == greedy
    end = next(place for place, token in enumerate(greedy[0]) if token < 128)  # a whole character
    stopped = _sampled(byte_run, {"do_sample": False, "stop_strings": chr(greedy[0][end])})
    assert stopped == [each[: end + 1] for each in greedy]
    free = _sampled(byte_run, {}, num_answers=8)
    assert len(set(map(tuple, free))) == 8
    assert _sampled(byte_run, {"do_sample": False}, temperature=0.7, top_p=0.95) != greedy
    assert _sampled(byte_run, {"do_sample": True, "num_beams": 3}, temperature=0) == greedy
    banned = sorted({token for answer in (*greedy, *free) for token in answer})
    assert not {t for answer in _sampled(byte_run, {"suppress_tokens": banned}) for t in answer} & set(banned)
    punished = _sampled(byte_run, {"do_sample": False, "repetition_penalty": 1e6})[0]
    assert len(set(punished)) == len(punished) > len(set(greedy[0]))


def test_a_chat_template_with_a_syntax_error_is_an_error(chat_folder: Path) -> None:
    (chat_folder / "chat_template.jinja").write_text("{% for m in messages %}")
    with pytest.raises(UserError, match="the chat template has a syntax error in line 1"):
        load_result(chat_folder, device=CPU)


def test_a_model_of_a_pretraining_job_on_bytes_has_an_end_token(tmp_path: Path) -> None:
    save_model(tmp_path, vocab_size=257)
    result = load_result(tmp_path, device=CPU)
    assert result.tokenizer.encode("to be") == list(b"to be")
    assert 256 in result.stop_tokens
    assert result.tokenizer.decode(result.tokenizer.encode("to be")) == "to be"


def test_a_prompt_without_template_is_continued(byte_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chat_command.main([str(byte_run), "--prompt", "to be", "--max-new-tokens", "9", "--temperature", "0"])
    result = load_result(byte_run, device=CPU)
    ids = _answer(result, list(b"to be"), max_new_tokens=9, temperature=0)
    shown = result.tokenizer.decode(ids).rstrip("\N{REPLACEMENT CHARACTER}")  # the last character may be incomplete
    assert capsys.readouterr().out == f"to be{shown}\n"


def test_lines_of_a_chat_continue_one_conversation(
    chat_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    real = chat_command.answer_tokens

    def spy(result: LoadedResult, input_ids: Any, **options: Any) -> Any:
        seen.append(" ".join(WORDS[i] for i in input_ids))
        return real(result, input_ids, **options)

    monkeypatch.setattr(chat_command, "answer_tokens", spy)
    monkeypatch.setattr("sys.stdin", io.StringIO("to be\nor not\n/new\n\nnot\n/quit\nto\n"))
    chat_command.main([str(chat_folder), "--max-new-tokens", "3", "--seed", "3"])
    first, second, _ = answers = capsys.readouterr().out.splitlines()
    assert len(answers) == 3
    assert seen[0] == "<user> to be <answer>"
    assert seen[1] == " ".join(f"<user> to be <answer> {first} <user> or not <answer>".split())
    assert seen[2] == "<user> not <answer>"
    assert second is not None


def test_stop_tokens_end_an_answer(chat_folder: Path) -> None:
    result = load_result(chat_folder, device=CPU)
    assert result.stop_tokens == (0,)
    torch.manual_seed(1)
    tokens = _answer(result, [1, 3], max_new_tokens=200, temperature=5.0, top_p=1.0)
    assert 0 not in tokens
    assert len(tokens) < 200


def test_the_token_with_which_the_template_ends_a_turn_ends_an_answer(tmp_path: Path) -> None:
    """It is neither the end token of texts, nor in `generation_config.json`."""
    save_model(tmp_path, vocab_size=len(WORDS))
    template = "{% for m in messages %}<user> {{ m.content }} x <answer> {% endfor %}"  # x is unknown
    save_tokenizer(tmp_path, template=template, special=["<user>", "<answer>"])
    result = load_result(tmp_path, device=CPU)
    assert result.stop_tokens == (WORDS.index("<end>"), WORDS.index("<answer>"))
    torch.manual_seed(1)
    tokens = _answer(result, [1, 3], max_new_tokens=200, temperature=5.0, top_p=1.0)
    assert WORDS.index("<answer>") not in tokens
    assert len(tokens) < 200


def test_perplexity_and_accuracy_equal_a_plain_loop(byte_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = ["to be or not to be", "that is"]
    data = byte_run / "data.jsonl"
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    eval_command.main([str(byte_run), "--data", str(data), "--length", "7"])
    got = json.loads(capsys.readouterr().out)
    model, loss, right, count = load_result(byte_run, device=CPU).model, 0.0, 0, 0
    exact_loss = torch.zeros((), dtype=torch.float64)
    for text in texts:
        ids = list(text.encode())
        for position in range(1, len(ids)):
            start = (position - 1) // 7 * 7  # windows of seven predicted tokens
            given = torch.tensor([ids[start:position]])
            log_probs = model(input_ids=given).logits[0, -1].log_softmax(dim=-1)
            loss -= log_probs[ids[position]].item()
            exact_loss -= in_float64(model, input_ids=given).logits[0, -1].log_softmax(dim=-1)[ids[position]]
            right += int(log_probs.argmax() == ids[position])
            count += 1
    assert got["tokens"] == count == 23
    exact = exact_loss / count
    assert_rounds_like([torch.tensor(got["loss"])], [exact], peer=[torch.tensor(loss / count)])
    assert got["perplexity"] == pytest.approx(math.exp(got["loss"]), rel=1e-9)
    assert got["bits_per_byte"] == pytest.approx(got["loss"] / math.log(2), rel=1e-9)
    assert got["accuracy"] == right / count


@pytest.mark.parametrize(("scale", "loss"), [(1e6, None), (math.nan, "nan")])
def test_a_model_that_diverged_is_evaluated(
    scale: float, loss: str | None, byte_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The exponential of a loss above 709 is infinite, and JSON has no infinity."""
    model = load_result(byte_run, device=CPU).model
    model.lm_head.weight.data *= scale
    model.save_pretrained(byte_run / "export")
    (byte_run / "data.txt").write_text("to be or not to be")
    eval_command.main([str(byte_run), "--data", str(byte_run / "data.txt")])
    got = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert got["loss"] == loss or got["loss"] > 709
    assert got["perplexity"] == (loss or "inf")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere", "--prompt", "a"], "nowhere does not exist; expected the folder of a run or of a model"),
        ([".", "--prompt", "a"], r"\. has no config\.json; expected a folder in Hugging Face layout, or a run folder"),
        (["lora", "--prompt", "a"], "their base model is missing: none is named.* Pass --base FOLDER"),
        (["run", "--prompt", "a"], r"run is a run without an export; expected run/export/config\.json"),
        (["words", "--prompt", "a"], r"words has no tokenizer .* vocabulary of 7 tokens is not the byte vocabulary"),
        (
            ["bytes", "--prompt", "a" * 40],
            "the conversation has 40 tokens; the model supports 32, including the answer",
        ),
        (["bytes", "--prompt", "a", "--system", "b"], "--system needs a chat template, but the tokenizer of bytes"),
        (["bytes", "--prompt", ""], "the prompt '' has no tokens"),
        (["bytes", "--max-new-tokens", "0"], "--max-new-tokens 0; expected at least 1"),
        (["bytes", "--top-p", "0"], r"--top-p 0\.0; expected above 0 and at most 1"),
        (["bytes", "--device", "nodevice"], "--device nodevice is not usable"),
    ],
)
def test_mistakes_in_a_chat_get_one_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("lora", "run/checkpoints"):
        Path(name).mkdir(parents=True)
    Path("lora/adapter_config.json").write_text("{}")
    save_model(Path("words"), vocab_size=7)
    save_model(Path("bytes"), vocab_size=256)
    with pytest.raises(UserError, match=message):
        chat_command.main(arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bytes"], "got neither --data nor --tasks; expected one of"),
        (["bytes", "--data", "none.txt"], r"none\.txt does not exist"),
        (["bytes", "--data", "empty.txt"], r"empty\.txt contains no text"),
        (["bytes", "--data", "a.txt"], "every text has fewer than two tokens"),
        (["bytes", "--data", "b.jsonl"], r"b\.jsonl, line 3: expected a text in the field 'text'"),
        (["bytes", "--data", "a.txt", "--length", "0"], "--length 0, --limit None; expected at least 1"),
        (["bytes", "--tasks", "hellaswag"], "--tasks needs lm-eval, which is not installed"),
    ],
)
def test_mistakes_in_an_evaluation_get_one_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(eval_command, "find_spec", lambda name: None)
    save_model(Path("bytes"), vocab_size=256)
    Path("empty.txt").write_text("")
    Path("a.txt").write_text("a")
    Path("b.jsonl").write_text('{"text": "to be"}\n\n{"txt": "or"}\n')
    with pytest.raises(UserError, match=message):
        eval_command.main(arguments)


@pytest.mark.parametrize("length", [3, 1024])
@pytest.mark.parametrize("text", ["plain text", "é" * 9, "漢字かな" * 5])
def test_bits_per_byte_count_the_bytes_of_the_text(text: str, length: int, byte_run: Path) -> None:
    result = load_result(byte_run, device=CPU)
    score = eval_command.score_texts(result, [text], length=length)
    num_bytes = len(text.encode()) - 1  # a token is a byte, and the first one is not predicted
    assert score.num_tokens == num_bytes
    assert score.bits_per_byte == pytest.approx(score.loss * score.num_tokens / math.log(2) / num_bytes)


def test_a_space_that_the_tokenizer_adds_is_no_byte_of_the_text(byte_run: Path) -> None:
    result = load_result(byte_run, device=CPU)
    backend = Tokenizer(models.BPE(vocab={"Ġ": 0, "h": 1, "i": 2}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    score = eval_command.score_texts(replace(result, tokenizer=TextTokenizer(backend)), ["hi"], length=8)
    assert score.bits_per_byte == pytest.approx(score.loss * 2 / math.log(2) / 2)


def test_the_export_of_a_run_is_found_beside_the_configuration_of_the_job(byte_run: Path) -> None:
    (byte_run / "config.json").write_text('{"steps": 2}')
    (byte_run / "checkpoints").mkdir()
    assert find_export(byte_run) == byte_run / "export"
    (byte_run / "export").rename(byte_run / "elsewhere")
    with pytest.raises(UserError, match="is a run without an export"):
        find_export(byte_run)
    (byte_run / "adapters").mkdir()
    (byte_run / "adapters" / "adapter_config.json").write_text("{}")
    assert find_export(byte_run) == byte_run / "adapters"
    assert find_export(byte_run / "elsewhere") == byte_run / "elsewhere"
