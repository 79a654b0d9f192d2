import json
from pathlib import Path
from typing import Any

import pytest

from d9d_dist import UserError
from d9d_loop.data import (
    IndexedStream,
    JsonLines,
    JsonObject,
    MixtureStream,
    open_samples,
    read_conversation,
    read_pair,
)
from d9d_loop.data.conversation import read_margin

USER, ANSWER = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}


@pytest.mark.parametrize(
    "sample",
    [
        {"messages": [USER, ANSWER]},
        {"conversations": [USER, ANSWER]},
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]},
        {"messages": [{**USER, "tool_calls": None}, ANSWER], "tools": None},  # as a Hugging Face dataset has it
        {"messages": [USER, ANSWER], "tools": "[]"},
    ],
)
def test_every_supported_format_gives_the_same_conversation(sample: dict[str, Any]) -> None:
    conversation = read_conversation(sample)
    assert conversation.messages == [USER, ANSWER]
    assert (conversation.tools, conversation.first_trained) == (None, 0)


def test_only_the_completion_contributes_to_the_loss() -> None:
    assert read_conversation({"prompt": "hi", "completion": "hello"}).messages == [USER, ANSWER]
    conversation = read_conversation({"prompt": [USER, ANSWER, USER], "completion": [ANSWER]})
    assert (len(conversation.messages), conversation.first_trained) == (4, 3)


def test_tool_calls_have_objects_as_arguments() -> None:
    call = {"type": "function", "function": {"name": "get", "arguments": '{"city": "Bonn"}'}}
    schema = {"type": "function", "function": {"name": "get"}}
    expected = {"name": "get", "arguments": {"city": "Bonn"}}
    conversation = read_conversation(
        {"messages": [USER, {"role": "assistant", "tool_calls": [call]}], "tools": [schema]}
    )
    assert conversation.tools == [schema]
    assert conversation.messages[1] == {
        "role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": expected}],
    }  # fmt: skip
    sharegpt = {
        "system": "be brief",
        "conversations": [
            {"from": "human", "value": "hi"},
            {"from": "function_call", "value": '{"name": "get", "arguments": {"city": "Bonn"}}'},
            {"from": "observation", "value": "sunny"},
        ],
    }
    system, user, assistant, tool = read_conversation(sharegpt).messages
    assert (system["role"], user, tool) == ("system", USER, {"role": "tool", "content": "sunny"})
    assert assistant["tool_calls"] == [{"type": "function", "function": expected}]


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        ({"text": "a"}, r"a sample has the keys text; expected messages, conversations, or prompt and completion"),
        ({"messages": "hi"}, r"got messages of type str; expected a list"),
        ({"messages": []}, r"got messages of type list; expected a list of at least one message"),
        ({"messages": ["hi"]}, r"message 0 is a str; expected an object with role and content"),
        ({"messages": [{"role": "user"}]}, r"message 0 has the keys role; expected role, and content or tool_calls"),
        ({"conversations": [{"from": "bot", "value": "a"}]}, r"message 0 is from 'bot'; expected one of system, human"),
        ({"messages": [USER, {**ANSWER, "weight": 0.5}]}, r"message 1 has weight 0.5; expected 1, or 0 to exclude it"),
        ({"messages": [USER], "tools": "{"}, r"tools is not JSON"),
        ({"messages": [USER], "tools": {}}, r"tools is a dict; expected a list of JSON schemas"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{"}]}]}, r"which are not JSON"),
    ],
)
def test_samples_in_unsupported_formats_are_refused(sample: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_conversation(sample)


def test_every_supported_format_gives_the_same_pair() -> None:
    other = {"role": "assistant", "content": "go away"}
    for sample in (
        {"prompt": "hi", "chosen": "hello", "rejected": "go away"},
        {"prompt": [USER], "chosen": [ANSWER], "rejected": [other]},
        {"chosen": [USER, ANSWER], "rejected": [USER, other]},
    ):
        chosen, rejected = read_pair(sample)
        assert (chosen.messages, rejected.messages) == ([USER, ANSWER], [USER, other])
        assert chosen.first_trained == rejected.first_trained == 1


@pytest.mark.parametrize("prompt", ["hi", " hi\n", [USER]])
@pytest.mark.parametrize("system", [{}, {"system": "be kind"}, {"system_prompt": "be kind"}])
def test_answers_may_repeat_the_prompt(prompt: Any, system: dict[str, str]) -> None:
    other = {"role": "assistant", "content": "go away"}
    kind = [{"role": "system", "content": "be kind"}] if system else []
    whole = {"prompt": prompt, "chosen": [USER, ANSWER], "rejected": [USER, other], **system}
    for sample in (whole, {**whole, "chosen": [*kind, USER, ANSWER], "rejected": [*kind, USER, other]}):
        chosen, rejected = read_pair(sample)
        assert (chosen.messages, rejected.messages) == ([*kind, USER, ANSWER], [*kind, USER, other])
        assert chosen.first_trained == rejected.first_trained == len(kind) + 1
    conversation = read_conversation({"prompt": prompt, "completion": [USER, ANSWER], **system})
    assert (conversation.messages, conversation.first_trained) == ([*kind, USER, ANSWER], len(kind) + 1)


def test_a_system_message_of_its_own_comes_first() -> None:
    kind = {"role": "system", "content": "be kind"}
    formats: list[dict[str, Any]] = [{"messages": [USER, ANSWER]}, {"prompt": "hi", "completion": "hello"}]
    for sample in (*formats, {"messages": [kind, USER, ANSWER], "system_prompt": None}):
        assert read_conversation({"system": "be kind", **sample}).messages == [kind, USER, ANSWER]
    other = {"role": "assistant", "content": "no"}
    for sample in (
        {"prompt": "hi", "chosen": "hello", "rejected": "no"},
        {"chosen": [USER, ANSWER], "rejected": [USER, other]},
    ):
        chosen, rejected = read_pair({"system": "be kind", **sample})
        assert (chosen.messages, chosen.first_trained) == ([kind, USER, ANSWER], 2)
        assert (rejected.messages, rejected.first_trained) == ([kind, USER, other], 2)


def test_texts_without_a_prompt_have_their_common_start_as_the_prompt() -> None:
    chosen, rejected = read_pair({"chosen": "Q: hi A: yes", "rejected": "Q: hi A: no", "question": "hi", "id": 3})
    assert [each["content"] for each in chosen.messages] == ["Q: hi A:", " yes"]
    assert [each["content"] for each in rejected.messages] == ["Q: hi A:", " no"]
    with pytest.raises(UserError, match="the chosen and the rejected conversation are equal"):
        read_pair({"chosen": "Q: hi A: yes", "rejected": "Q: hi A: yes"})


def test_variables_of_the_template_are_an_object() -> None:
    for given in ({"enable_thinking": False}, '{"enable_thinking": false}'):
        conversation = read_conversation({"messages": [USER, ANSWER], "chat_template_kwargs": given})
        assert conversation.template_options == {"enable_thinking": False}
        assert conversation.to_json() != read_conversation({"messages": [USER, ANSWER]}).to_json()


def test_margins_are_numbers() -> None:
    assert [read_margin(each) for each in ({}, {"margin": None}, {"margin": 2}, {"margin": -0.5})] == [0, 0, 2, -0.5]
    for margin in ("2", True, float("nan"), [1.0]):
        with pytest.raises(UserError, match=r"a pair has margin = .*; expected a finite number"):
            read_margin({"margin": margin})


TWO: dict[str, Any] = {"chosen": [ANSWER], "rejected": [{**ANSWER, "content": "no"}]}


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        ({"question": "hi", **TWO}, "no prompt, and question; expected the key prompt"),
        (
            {"question": "hi", "chosen": "yes sir", "rejected": "yes"},
            "no prompt, and question; expected the key prompt",
        ),
        ({"messages": [USER], "chosen": "yes", "rejected": "no"}, "no prompt, and messages; expected the key prompt"),
        ({"prompt": "bye", "chosen": [USER, ANSWER], "rejected": [USER]}, "an answer that begins with another message"),
        ({"prompt": "hi", "chosen": [USER, ANSWER], "rejected": "no"}, "an answer that begins with another message"),
        ({"prompt": "hi", "system": 3, **TWO}, "system of the type int; expected a text"),
        (
            {"prompt": [{"role": "system", "content": "be kind"}, USER], "system": "be rude", **TWO},
            "system, and messages with another system message",
        ),
        ({"prompt": "hi", "chat_template_kwargs": [], **TWO}, "chat_template_kwargs is a list; expected an object"),
        (
            {"prompt": "hi", "chat_template_kwargs": {"tools": 1}, **TWO},
            "chat_template_kwargs has tools, which d9d sets",
        ),
    ],
)
def test_pairs_whose_prompt_is_elsewhere_are_an_error(sample: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_pair(sample)


def test_equal_answers_are_refused() -> None:
    with pytest.raises(UserError, match="the chosen and the rejected conversation are equal"):
        read_pair({"prompt": "hi", "chosen": "hello", "rejected": "hello"})
    with pytest.raises(UserError, match="a sample has the keys prompt; expected chosen and rejected"):
        read_pair({"prompt": "hi"})


def test_a_function_call_in_sharegpt_format_keeps_its_weight() -> None:
    call = {"from": "function_call", "value": '{"name": "f", "arguments": {}}', "weight": 0}
    (message,) = read_conversation({"conversations": [call]}).messages
    assert message["weight"] == 0


def _call(name: str, arguments: dict[str, Any], **message: Any) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call], **message}


def _tool(name: str, **properties: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"properties": properties}}}


CALLS: list[dict[str, Any]] = [
    {
        "messages": [USER, _call("move", {"to": {"x": 1}, "by": [{"dx": 1}, {"dy": 2}]})],
        "tools": [_tool("move", to={"type": "object"})],
    },
    {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "?"}, {"type": "image", "path": "a"}]}],
        "tools": [_tool("say", text={"type": "string", "default": "no"}), _tool("stop")],
    },
    {"messages": [_call("say", {"text": "hello"})], "tools": None},
]


@pytest.mark.parametrize("count", [1, 3])
def test_nulls_of_a_table_are_absent_keys(count: int, tmp_path: Path) -> None:
    """A table gives all objects of a column the same keys; `count` rows of it have their keys from one another."""
    datasets = pytest.importorskip("datasets")
    samples = [CALLS[0], CALLS[0] | CALLS[2], CALLS[0] | {"tools": CALLS[1]["tools"]}][:count]
    table = datasets.Dataset.from_list(samples)
    table.to_parquet(tmp_path / "a.parquet")
    for rows in (table, open_samples([tmp_path / "a.parquet"], key="files")):
        for row, sample in zip(rows, samples, strict=True):
            assert read_conversation(row) == read_conversation(JsonObject(sample))
    parts = datasets.Dataset.from_list([CALLS[1]])[0]
    assert read_conversation(parts) == read_conversation(JsonObject(CALLS[1]))
    first, second = ({"prompt": "hi", "chosen": [each], "rejected": "no"} for each in (CALLS[2]["messages"][0], ANSWER))
    for row, sample in zip(datasets.Dataset.from_list([first, second]), (first, second), strict=True):
        assert read_pair(row) == read_pair(JsonObject(sample))


def test_nulls_of_json_are_kept(tmp_path: Path) -> None:
    sample = {"messages": [_call("say", {"text": None})], "tools": [_tool("say", text={"default": None})]}
    lines, objects, text = tmp_path / "a.jsonl", tmp_path / "a.json", tmp_path / "b.jsonl"
    lines.write_text(json.dumps(sample), encoding="utf-8")
    objects.write_text(json.dumps([sample]), encoding="utf-8")
    call = {"type": "function", "function": {"name": "say", "arguments": '{"text": null}'}}
    in_text = {"messages": [{**sample["messages"][0], "tool_calls": [call]}], "tools": json.dumps(sample["tools"])}
    text.write_text(json.dumps(in_text), encoding="utf-8")
    mixture = MixtureStream({"a": IndexedStream(JsonLines(lines), seed=0)}, weights={"a": 1}, seed=0)
    read = [open_samples([path], key="files")[0] for path in (lines, objects, text)]
    for each in (
        *read,
        dict(in_text),
        mixture.read((0, 0)),
        {"messages": [USER, *sample["messages"]], "tools": sample["tools"]},
    ):
        conversation = read_conversation(each)
        assert conversation.messages[-1]["tool_calls"][0]["function"]["arguments"] == {"text": None}
        assert conversation.tools == sample["tools"]
    pair = JsonObject(prompt="hi", chosen=sample["messages"], rejected="no")
    assert read_pair(pair)[0].messages[1] == sample["messages"][0]
