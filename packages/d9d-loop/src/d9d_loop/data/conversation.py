"""Conversion of conversations in common dataset formats to messages for chat templates."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from math import isfinite
from typing import Any, Literal, TypeAlias, final

from d9d_dist import UserError
from d9d_loop.data.json_lines import JsonObject

TooLong: TypeAlias = Literal["refuse", "drop", "truncate"]
"""Treatment of a conversation of more than `max_length` positions."""

ChatLabels: TypeAlias = Literal["assistant", "all"]
"""Tokens of a conversation that contribute to the loss: the assistant's turns, or all tokens except for a `prompt`."""

TextPairs: TypeAlias = Literal["chat", "joined"]
"""Treatment of a `prompt` and a `completion` that are texts: by the chat template, or joined, with an end token."""

Message = dict[str, Any]
"""Message of a chat template: `role` and `content`, and possibly `tool_calls`, `reasoning_content` and others."""

_SHAREGPT_ROLES = {
    "system": "system",
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "model", "function_call"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
}


_ANSWERS = ("chosen", "rejected")
_SYSTEM = ("system", "system_prompt", "system_message")
_PROMPTS = ("question", "instruction", "query", "input", "messages", "conversations", "conversation", "history")
"""Keys that hold a prompt in common datasets, beside chosen and rejected answers."""

_OF_TEMPLATES = {"messages", "tools", "documents", "add_generation_prompt"}


@final
@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages of a conversation.

    Attributes:
        tools: JSON schemas of the tools that the assistant may call; None for no tools.
        first_trained: Index of the first message that may contribute to the loss; earlier messages are context.
        is_text_pair: True for a prompt and a completion, or an answer of a pair, that are texts without roles.
        is_split: True if such a prompt is only the common start of two texts, which the chat template cannot render.
        template_options: Further variables of the chat template.
    """

    messages: list[Message]
    tools: list[Any] | None = None
    first_trained: int = field(default=0)
    is_text_pair: bool = False
    is_split: bool = False
    template_options: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        """Return the contents as JSON, to compare conversations."""
        values = [self.messages, self.tools, self.first_trained, self.is_text_pair, self.template_options]
        return json.dumps(values, default=str)


def read_conversation(sample: Mapping[str, Any]) -> Conversation:
    """Convert a sample to a conversation.

    Formats, by key:

    - `messages`: a list of messages with `role` and `content`; the form of OpenAI and Hugging Face. `tool_calls` may
      have their arguments as JSON text. `weight: 0` excludes an assistant message from the loss.
    - `conversations`: the same, or ShareGPT's `from` and `value`. The value of `function_call` is a JSON object with
      `name` and `arguments`.
    - `prompt` and `completion`: each a text, or a list of messages. Only the completion contributes to the loss. It may
      repeat the prompt.

    Additional keys: `system` has the system message, `tools` a list of JSON schemas, `chat_template_kwargs` an object
    with further variables of the chat template; the last two may be JSON text.

    A table, such as Parquet or a Hugging Face dataset, gives all objects of a column the same keys, and stores an
    absent key as null. So nulls are removed at any depth, except from a `JsonObject`, from JSON text, and from samples
    in which objects of one list have different keys: no table has these.

    Raises:
        UserError: If the sample has none of these formats, or a message lacks its role or content.
    """
    sample = _without_nulls_of_tables(sample)
    common = _common(sample)
    for key in ("messages", "conversations"):
        if sample.get(key) is not None:
            return Conversation(_with_system(sample, _messages(sample[key])), **common)
    if sample.get("prompt") is not None and sample.get("completion") is not None:
        is_pair = isinstance(sample["prompt"], str) and isinstance(sample["completion"], str)
        first, (messages,) = _with_prompt(sample, [_turn(sample["completion"], role="assistant")])
        return Conversation(messages, first_trained=first, is_text_pair=is_pair, **common)
    raise _unknown(sample, "messages, conversations, or prompt and completion")


def read_pair(sample: Mapping[str, Any]) -> tuple[Conversation, Conversation]:
    """Convert a preference sample to its chosen and rejected conversations. Only the answers contribute to the loss.

    `prompt`, `chosen` and `rejected` are each a text, or a list of messages; `chosen` and `rejected` follow `prompt`.
    Without `prompt`, both are whole conversations, and their common first messages are the prompt; of two texts, their
    common start, which only `text_pairs = "joined"` reads. Both may also repeat the prompt. Additional keys are as in
    `read_conversation`.

    Raises:
        UserError: If `chosen` or `rejected` is missing, one is a prefix of the other, or a message lacks its role or
            content.
    """
    if sample.get("chosen") is None or sample.get("rejected") is None:
        raise _unknown(sample, "chosen and rejected, with or without prompt")
    sample = _without_nulls_of_tables(sample)
    is_text = all(isinstance(sample[key], str) for key in _ANSWERS)
    is_split = is_text and sample.get("prompt") is None
    if is_split:
        sample = _split(sample)
    is_text &= isinstance(sample.get("prompt"), str)
    first, (chosen, rejected) = _with_prompt(sample, [_turn(sample[key], role="assistant") for key in _ANSWERS])
    pairs = zip(chosen, rejected, strict=False)
    num_common = next((number for number, (one, other) in enumerate(pairs) if one != other), None)
    if num_common is None:
        raise UserError(
            "the chosen and the rejected conversation are equal, or one is a prefix of the other; expected answers "
            "that differ. Remove the sample."
        )
    first = max(first, num_common)
    if all(each["role"] == "system" for each in chosen[:first]):
        _check_prompt(sample, "")
    common: dict[str, Any] = {"first_trained": first, "is_text_pair": is_text, "is_split": is_split, **_common(sample)}
    return Conversation(chosen, **common), Conversation(rejected, **common)


def read_margin(sample: Mapping[str, Any]) -> float:
    """Return the `margin` of a preference sample, by which the reward of the chosen answer must be higher; else 0.

    Raises:
        UserError: If it is not a finite number.
    """
    margin = sample.get("margin")
    if margin is None:
        return 0.0
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not isfinite(margin):
        raise UserError(f"a pair has margin = {margin!r}; expected a finite number. Correct or rename it.")
    return float(margin)


def with_parts(message: Message) -> Message:
    """Return a message whose content is a list of parts, as the templates of models with images read it."""
    content = message["content"]
    return {**message, "content": [{"type": "text", "text": content}] if isinstance(content, str) else content}


def _common(sample: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `Conversation` that all formats share."""
    options = _from_json("chat_template_kwargs", sample.get("chat_template_kwargs"), dict, "an object")
    if set_already := options and sorted(options.keys() & _OF_TEMPLATES):
        raise UserError(f"chat_template_kwargs has {', '.join(set_already)}, which d9d sets. Remove it.")
    tools = _from_json("tools", sample.get("tools"), list, "a list of JSON schemas")
    return {"tools": tools, "template_options": options or {}}


def _with_system(sample: Mapping[str, Any], messages: list[Message]) -> list[Message]:
    """Return messages after the system message of a key of its own, if there is one."""
    for key in _SYSTEM:
        if not sample.get(key):
            continue
        if not isinstance(sample[key], str):
            raise UserError(f"a sample has {key} of the type {type(sample[key]).__name__}; expected a text. Rename it.")
        if messages[0]["role"] != "system":
            return [{"role": "system", "content": sample[key]}, *messages]
        if messages[0]["content"] != sample[key]:
            raise UserError(f"a sample has {key}, and messages with another system message; expected one. Remove one.")
    return messages


def _with_prompt(sample: Mapping[str, Any], answers: list[list[Message]]) -> tuple[int, list[list[Message]]]:
    """Return the number of messages of a prompt, and the conversations of the answers, which may repeat the prompt."""
    if sample.get("prompt") is None:
        return 0, [_with_system(sample, answer) for answer in answers]
    prompt = _turn(sample["prompt"], role="user")
    num_systems = int(answers[0][0]["role"] == "system" != prompt[0]["role"])
    num_first = num_systems + len(prompt)
    heads = [answer[:num_first] for answer in answers]
    if all(head == heads[0] and list(map(_said, head[num_systems:])) == list(map(_said, prompt)) for head in heads):
        prompt, answers = heads[0], [answer[num_first:] for answer in answers]
    elif any(prompt[-1]["role"] != "assistant" and answer[0]["role"] in ("system", "user") for answer in answers):
        raise UserError(
            "a sample has a prompt, and an answer that begins with another message of a user or a system; expected the "
            "answer alone, or whole conversations that begin with the prompt. Remove the prompt, or these messages."
        )
    prompt = _with_system(sample, prompt)
    return len(prompt), [[*prompt, *answer] for answer in answers]


def _said(message: Message) -> tuple[str, Any]:
    content = message["content"]
    return message["role"], content.strip() if isinstance(content, str) else content


def _split(sample: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return two texts without a prompt with their common start as the prompt."""
    chosen, rejected = (sample[key] for key in _ANSWERS)
    prompt = "".join(a for a, _ in takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False)))
    # A tokenizer joins a space to the word after it.
    prompt = prompt[:-1] if prompt.endswith(" ") else prompt
    _check_prompt(sample, prompt)
    return {**sample, "prompt": prompt, "chosen": chosen[len(prompt) :], "rejected": rejected[len(prompt) :]}


def _check_prompt(sample: Mapping[str, Any], prompt: str) -> None:
    """Raise `UserError` if a sample without `prompt` has a key that usually holds it, and that the answers lack."""
    found = [
        key for key in _PROMPTS if sample.get(key) and not (isinstance(sample[key], str) and sample[key] in prompt)
    ]
    if found:
        raise UserError(
            f"a sample has chosen and rejected answers, no prompt, and {', '.join(found)}; expected the key prompt, "
            f"which is a text or a list of messages. Rename {found[0]} to prompt, or another key."
        )


def _without_nulls_of_tables(sample: Mapping[str, Any]) -> Mapping[str, Any]:
    if isinstance(sample, JsonObject) or _differ_in_keys([sample]):
        return sample
    return _without_nulls(sample)


def _differ_in_keys(values: list[Any]) -> bool:
    """Return True if values of one column are objects with different keys, or contain such objects at any depth."""
    objects = [value for value in values if isinstance(value, Mapping)]
    if len({frozenset(each) for each in objects}) > 1:
        return True
    columns = [[each[key] for each in objects] for key in (objects[0] if objects else ())]
    columns.append([item for value in values if isinstance(value, list) for item in value])
    return any(_differ_in_keys(column) for column in columns if column)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return list(map(_without_nulls, value)) if isinstance(value, list) else value


def _messages(values: Any) -> list[Message]:
    if not isinstance(values, Sequence) or isinstance(values, str) or not values:
        raise UserError(f"got messages of type {type(values).__name__}; expected a list of at least one message.")
    return [_message(number, value) for number, value in enumerate(values)]


def _turn(value: Any, *, role: str) -> list[Message]:
    return [{"role": role, "content": value}] if isinstance(value, str) else _messages(value)


def _message(number: int, value: Any) -> Message:
    if not isinstance(value, Mapping):
        raise UserError(f"message {number} is a {type(value).__name__}; expected an object with role and content.")
    if "role" not in value and "from" in value:
        value = _from_sharegpt(number, value)
    message = {key: each for key, each in value.items() if each is not None}
    if not isinstance(message.get("role"), str) or not ({"content", "tool_calls"} & message.keys()):
        raise UserError(
            f"message {number} has the keys {', '.join(value)}; expected role, and content or tool_calls (or, in the "
            "form of ShareGPT, from and value)."
        )
    if message.get("weight", 1) not in (0, 1):
        raise UserError(
            f"message {number} has weight {message['weight']!r}; expected 1, or 0 to exclude it from the loss."
        )
    parts = message.setdefault("content", "")
    for part in parts if isinstance(parts, list) else ():
        if isinstance(part, Mapping) and part.get("type") == "text" and not isinstance(part.get("text"), str):
            raise UserError(
                f"message {number} has a part of the type text with the keys {', '.join(part)}; expected a text in "
                "the key text. Rename its key, or remove the part."
            )
    if "tool_calls" in message:
        message["tool_calls"] = [_tool_call(number, call) for call in message["tool_calls"]]
    return message


def _from_sharegpt(number: int, value: Mapping[str, Any]) -> Message:
    role = _SHAREGPT_ROLES.get(value["from"])
    if role is None:
        raise UserError(
            f"message {number} is from {value['from']!r}; expected one of {', '.join(_SHAREGPT_ROLES)}. Rename it."
        )
    content = value.get("value")
    more = {key: value[key] for key in ("weight",) if key in value}
    if value["from"] == "function_call":
        return {"role": role, "tool_calls": [{"type": "function", "function": _json(number, content)}], **more}
    return {"role": role, "content": content, **more}


def _tool_call(number: int, call: Any) -> Any:
    """Return a tool call whose arguments are an object, as templates expect."""
    if not isinstance(call, Mapping):
        raise UserError(f"message {number} has a tool call of type {type(call).__name__}; expected an object.")
    function = call.get("function", call)
    if isinstance(function, Mapping) and isinstance(function.get("arguments"), str):
        function = {**function, "arguments": _json(number, function["arguments"])}
    return {**call, "function": function} if "function" in call else function


def _json(number: int, text: Any) -> Any:
    try:
        return json.loads(text) if isinstance(text, str) else text
    except ValueError as error:
        raise UserError(f"message {number} has the tool arguments {text!r}, which are not JSON: {error}.") from None


def _from_json(name: str, value: Any, kind: type, expected: str) -> Any:
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else None
        except ValueError as error:
            raise UserError(f"{name} is not JSON: {error}; expected {expected}.") from None
    if value is not None and not isinstance(value, kind):
        raise UserError(f"{name} is a {type(value).__name__}; expected {expected}.")
    return value or None


def _unknown(sample: Mapping[str, Any], expected: str) -> UserError:
    return UserError(f"a sample has the keys {', '.join(map(str, sample))}; expected {expected}. Rename its keys.")
