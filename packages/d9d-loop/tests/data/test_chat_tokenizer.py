import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("jinja2", reason="needs the extra chat")
pytest.importorskip("tokenizers", reason="needs the extra chat")

from chat_examples import CHATML, byte_tokenizer, chat, chat_tokenizer

from d9d_dist import UserError
from d9d_loop.data import (
    ChatTemplate,
    ChatTokenizer,
    ChatTokens,
    mark_spans,
    read_chat_template,
    read_chat_tokenizer,
    read_conversation,
    read_pair,
)
from d9d_loop.data.text_tokenizer import TextTokenizer


def _marked(tokens: ChatTokens) -> str:
    return mark_spans(tokens.text, tokens.spans)


def _trained(tokenizer: Any, tokens: ChatTokens) -> str:
    ids = [token for token, is_trained in zip(tokens.tokens, tokens.mask, strict=True) if is_trained]
    return tokenizer.decode(ids, skip_special_tokens=False)


def test_only_answers_and_their_stop_tokens_contribute_to_the_loss() -> None:
    tokens = chat_tokenizer()(read_conversation(chat("Hi", "Hello! é大", "Bye", "Bye.")))
    assert _marked(tokens) == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n⟦Hello! é大<|im_end|>⟧\n"
        "<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n⟦Bye.<|im_end|>⟧\n"
    )
    assert _trained(byte_tokenizer("<|im_start|>", "<|im_end|>"), tokens) == "Hello! é大<|im_end|>Bye.<|im_end|>"
    assert tokens.mask[-1]  # the last newline is dropped


def test_messages_of_weight_0_and_of_the_prompt_do_not_contribute_to_the_loss() -> None:
    sample = chat("Hi", "Hello", "Bye", "Bye.")
    sample["messages"][1]["weight"] = 0
    assert "⟦Hello" not in _marked(chat_tokenizer()(read_conversation(sample)))
    split = {"prompt": sample["messages"][:3], "completion": "See you."}
    marked = _marked(chat_tokenizer()(read_conversation(split)))
    assert marked.count("⟦") == 1
    assert marked.endswith("⟦See you.<|im_end|>⟧\n")


def test_messages_of_weight_0_do_not_contribute_to_the_loss_of_all_tokens() -> None:
    sample = chat("Hi", "Hello", "Bye", "Bye.")
    sample["messages"][1]["weight"] = 0
    tokens = chat_tokenizer(labels="all")(read_conversation(sample))
    header, turn = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", "Hello<|im_end|>\n"
    rest = "<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\nBye.<|im_end|>\n"
    assert _marked(tokens) == f"⟦{header}⟧{turn}⟦{rest}⟧"
    assert _trained(byte_tokenizer("<|im_start|>", "<|im_end|>"), tokens) == header + rest
    sample["messages"][0]["weight"] = 0
    assert _marked(chat_tokenizer(labels="all")(read_conversation(sample))) == (
        f"<|im_start|>user\nHi<|im_end|>\n⟦<|im_start|>assistant\n⟧{turn}⟦{rest}⟧"
    )
    sample["messages"][3]["weight"] = 0
    tokens = chat_tokenizer(labels="all")(read_conversation(sample))
    assert (tokens.mask[-1], len(tokens.tokens)) == (True, len(tokens.mask))


def test_texts_without_a_prompt_are_joined_or_an_error() -> None:
    chosen, rejected = read_pair({"chosen": "Q: hi A: yes", "rejected": "Q: hi A: no"})
    with pytest.raises(
        UserError, match="texts without a prompt, which a chat template cannot render; expected a prompt"
    ):
        chat_tokenizer()(chosen)
    pairs = {"chosen": chosen, "rejected": rejected}
    joined = _joined_tokenizer()
    assert {key: _marked(joined(each)) for key, each in pairs.items()} == {
        "chosen": "Q: hi A:⟦ yes<|im_end|>⟧",
        "rejected": "Q: hi A:⟦ no<|im_end|>⟧",
    }
    system, _ = read_pair({"system": "be kind", "prompt": "a", "chosen": "b", "rejected": "c"})
    with pytest.raises(UserError, match='a sample has a system message, but text_pairs = "joined"'):
        joined(system)


def _joined_tokenizer() -> ChatTokenizer:
    text = TextTokenizer(byte_tokenizer("<|im_start|>", "<|im_end|>"), special={"eos_token": "<|im_end|>"})
    return ChatTokenizer(text, ChatTemplate(CHATML), text_pairs="joined")


def test_variables_of_a_sample_are_those_of_the_template() -> None:
    source = "{{ mode }}" + CHATML + "{% if add_generation_prompt and not thinks %}<none>{% endif %}"
    conversation = read_conversation({**chat("Hi", "<none>Hello"), "chat_template_kwargs": {"mode": "brief "}})
    marked = _marked(chat_tokenizer(source)(conversation))
    assert marked == "brief <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<none>⟦Hello<|im_end|>⟧\n"


@pytest.mark.parametrize("reads_parts", [False, True])
def test_texts_in_parts_are_joined_unless_the_template_reads_parts(reads_parts: bool) -> None:
    loop = "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    loop += "{{ part.text }}|{% endfor %}{% endif %}"
    loop = loop.replace("|{% endfor", "{% if not loop.last %}|{% endif %}{% endfor")
    template = CHATML.replace("{{ message.content }}", loop) if reads_parts else CHATML
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    text = ChatTemplate(template).render([{"role": "user", "content": parts}])
    assert text == f"<|im_start|>user\n{'a|b' if reads_parts else 'ab'}<|im_end|>\n"
    if not reads_parts:
        with pytest.raises(UserError, match="a message of the role user has a part that is not a text"):
            ChatTemplate(template).render([{"role": "user", "content": [{"type": "image"}]}])


@pytest.mark.parametrize("content", ["a", [{"type": "text", "text": "a"}]])
def test_a_content_is_given_in_parts_to_a_template_that_reads_only_parts(content: Any) -> None:
    loop = "{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}"
    template = ChatTemplate(CHATML.replace("{{ message.content }}", loop))
    assert template.render([{"role": "user", "content": content}]) == "<|im_start|>user\na<|im_end|>\n"


DROPS_THINKING = CHATML.replace(
    "{{ message.content }}", "{{ message.content if loop.last else message.content.split('</think>')[-1].lstrip() }}"
)


def test_thinking_that_the_template_drops_is_not_in_the_text() -> None:
    thinking = "<think>\nwell\n</think>\n\n"
    tokens = chat_tokenizer(DROPS_THINKING)(read_conversation(chat("a", f"{thinking}b", "c", f"{thinking}d")))
    assert _marked(tokens).count("well") == 1
    assert "assistant\n⟦b<|im_end|>⟧" in _marked(tokens)
    assert f"assistant\n⟦{thinking}d<|im_end|>⟧" in _marked(tokens)


def test_a_generation_prompt_may_open_a_thinking_block() -> None:
    opens = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
    tokens = chat_tokenizer(opens)(read_conversation(chat("a", "<think>\nwell\n</think>b")))
    assert "assistant\n<think>\n⟦well\n</think>b<|im_end|>⟧" in _marked(tokens)
    tokens = chat_tokenizer(opens)(read_conversation(chat("a", "b")))
    assert "assistant\n⟦b<|im_end|>⟧" in _marked(tokens)


COUNTS = CHATML.replace("{%- for", "{{ messages | length }}{% for", 1)
CHANGES = CHATML.replace(
    "{{ message.content }}", "{{ message.content }}{{ '' if loop.last or message.role == 'user' else '?' }}"
)
NO_STOP = CHATML.replace("<|im_end|>\n", "\n")
SPLITS = "{% for message in messages %}{{ message.role }}:{{ message.content }}<|im_end|>{% endfor %}" + (
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


@pytest.mark.parametrize("role", ["system", "assistant", "tool"])
def test_a_template_of_images_may_read_texts_of_a_role(role: str) -> None:
    """Such a template gets a text for this role, and parts for others; before, it printed a list as Python code."""
    loop = "{% for part in m.content %}[{{ part.type }}]{{ part.text }}{% endfor %}"
    source = "{% for m in messages %}{{ m.role }}:{% if m.role == '" + role + "' %}{{ m.content | trim }}{% else %}"
    source += loop + "{% endif %};{% endfor %}"
    if role == "assistant":  # like many, it renders no answer alone
        source = "{% if messages[0].role == 'assistant' %}{{ raise_exception('no user') }}{% endif %}" + source
    template = ChatTemplate(source, has_parts=True)
    first, last = ("system", "user") if role == "system" else ("user", role)
    for form in (str, lambda each: [{"type": "text", "text": each}]):
        messages = [{"role": first, "content": form("a")}, {"role": last, "content": form("b")}]
        expected = ["system:a;", "user:[text]b;"] if role == "system" else ["user:[text]a;", f"{role}:b;"]
        assert template.render(messages) == "".join(expected)
    with pytest.raises(UserError, match=f"the role {role} has a part that is not a text"):
        template.render([{"role": role, "content": [{"type": "image"}]}])


def test_a_first_message_may_be_read_in_another_form_than_later_ones() -> None:
    source = "{{ messages[0].content | trim }};{% for m in messages[1:] %}{% for part in m.content %}{{ part.text }}"
    template = ChatTemplate(source + "{% endfor %};{% endfor %}", has_parts=True)
    messages = [{"role": role, "content": [{"type": "text", "text": role}]} for role in ("system", "user", "assistant")]
    assert template.render(messages) == "system;user;assistant;"


def test_a_list_that_a_tool_returns_is_given_as_it_is() -> None:
    """Before, a template that reads a text of a tool, or its outputs one by one, got an error of parts."""
    outputs = "{% for each in m.content %}{{ each.output if each.output is defined else each }};{% endfor %}"
    source = "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}" + outputs
    template = ChatTemplate(source + "{% endif %}{% endfor %}")
    assert template.render([{"role": "tool", "content": [{"output": "42"}, {"output": 43}]}]) == "42;43;"
    assert template.render([{"role": "tool", "content": [{"type": "text", "text": "4"}, {"text": "2"}, "!"]}]) == "42!"
    with pytest.raises(UserError, match="the role tool has a part that is not a text"):
        template.render([{"role": "tool", "content": [{"type": "image"}]}])
    with pytest.raises(UserError, match="the role user has a part that is not a text"):
        template.render([{"role": "user", "content": [{"image": "a.png"}]}])


_NEEDS = {
    "id": ("m.tool_call_id|length == 9", "{{ m.name }}={{ m.content|string }}"),
    "call": ("seen.call", "{{ seen.call.function.name }}={{ m.content }}"),
    "more": ("m.of_this", "{{ m.of_this }}={{ m.content }}"),
}


@pytest.mark.parametrize("needs", list(_NEEDS))
@pytest.mark.parametrize("form", [str, lambda each: [{"type": "text", "text": each}]])
def test_a_template_of_images_may_read_texts_of_a_tool_only_after_a_call(needs: str, form: Any) -> None:
    """Before, the probe could not be rendered, and the parts of the result were printed as Python code."""
    condition, result = _NEEDS[needs]
    source = (
        "{% set seen = namespace(call=none) %}{% for m in messages %}{% if m.role == 'tool' %}"
        "{% if not (CONDITION) %}{{ raise_exception('no CONDITION') }}{% endif %}RESULT{% else %}"
        "{% if m.tool_calls %}{% set seen.call = m.tool_calls[0] %}{% elif m.content is string %}{{ m.content }}"
        "{% else %}{% for part in m.content %}[{{ part.type }}]{{ part.text }}{% endfor %}{% endif %};"
        "{% endif %}{% endfor %}"
    )
    source = source.replace("CONDITION", condition).replace("RESULT", result)
    call = {"id": "123456789", "type": "function", "function": {"name": "add", "arguments": {"x": 1}}}
    messages = [
        {"role": "user", "content": form("a")},
        {"role": "assistant", "content": form(""), "tool_calls": [call]},
        {"role": "tool", "name": "add", "tool_call_id": "123456789", "of_this": "add", "content": form("42")},
    ]
    assert ChatTemplate(source, has_parts=True).render(messages) == "[text]a;;add=42"


@pytest.mark.parametrize("has_parts", [False, True])
@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("message.content|upper", "A LONG ENOUGH ANSWER"),
        ("message.content|capitalize", "A long enough answer"),
        ("message.content|replace('a', '4')", "4 long enough 4nswer"),
        ("message.content if message.content|length > 15", "a long enough answer"),
    ],
)
def test_a_template_may_change_answers_or_write_some_only(has_parts: bool, written: str, expected: str) -> None:
    """Before, such a template was said to write no answers."""
    answer = "{{ " + f"({written}) if message.role == 'assistant' else message.content" + " }}"
    template = ChatTemplate(CHATML.replace("{{ message.content }}", answer), has_parts=has_parts)
    text = template.render(chat("a", "a long enough answer")["messages"])
    assert text == f"<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n{expected}<|im_end|>\n"


@pytest.mark.parametrize("has_parts", [False, True])
def test_a_template_without_the_texts_of_answers_is_an_error(has_parts: bool) -> None:
    """Parts that d9d makes have the key `text`, not `content`: before, only the stop token was learned."""
    loop = "{% for part in message.content %}{{ part.content }}{% endfor %}"
    template = ChatTemplate(CHATML.replace("{{ message.content }}", loop), has_parts=has_parts)
    with pytest.raises(UserError, match="the chat template does not write answers, neither a text nor parts"):
        template.render(chat("a", "b")["messages"])


def _with_blocks(answer: str) -> str:
    """Return a template of ChatML with other answers; double square brackets are a block."""
    answer = answer.replace("[[", "{% generation %}").replace("]]", "{% endgeneration %}")
    answer = "{% if message.role == 'assistant' %}" + answer + "{% else %}"
    return CHATML.replace("{{ message.content }}<|im_end|>", answer + "{{ message.content }}<|im_end|>{% endif %}")


LAST = "{% if loop.last %}[[{{ message.content }}<|im_end|>]]{% else %}{{ message.content }}<|im_end|>{% endif %}"


@pytest.mark.parametrize(
    ("answer", "parts"),
    [
        (LAST, ["d<|im_end|>"]),
        ("(think)[[{{ message.content }}<|im_end|>]]", ["b<|im_end|>", "d<|im_end|>"]),
        ("[[{{ message.content }}]](call)[[<|im_end|>]]", ["b", "<|im_end|>", "d", "<|im_end|>"]),
        ("[[{% if 0 %}x{% endif %}]][[{{ message.content }}<|im_end|>]]", ["b<|im_end|>", "d<|im_end|>"]),
    ],
)
def test_only_blocks_of_a_template_contribute_to_the_loss(answer: str, parts: list[str]) -> None:
    """The mask is that of transformers."""
    transformers = pytest.importorskip("transformers")
    template, conversation = _with_blocks(answer), read_conversation(chat("a", "b", "c", "d"))
    backend = byte_tokenizer("<|im_start|>", "<|im_end|>")
    found = ChatTokenizer(backend, ChatTemplate(template))(conversation)
    expected = transformers.PreTrainedTokenizerFast(tokenizer_object=backend).apply_chat_template(
        conversation.messages, chat_template=template, return_dict=True, return_assistant_tokens_mask=True
    )
    assert (found.tokens, [*map(int, found.mask)]) == (expected["input_ids"], expected["assistant_masks"])
    assert [found.text[start:stop] for start, stop in found.spans] == parts


def test_the_header_of_an_answer_in_a_block_does_not_contribute_to_the_loss() -> None:
    """As the template of SmolLM3 writes it."""
    template = (
        "{% for message in messages %}{% if message.role == 'assistant' %}{% generation %}<|im_start|>assistant "
        "{{ message.content }}<|im_end|>\n{% endgeneration %}{% else %}<|im_start|>user "
        "{{ message.content }}<|im_end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
    )
    tokens = chat_tokenizer(template)(read_conversation(chat("a", "b")))
    assert _marked(tokens) == "<|im_start|>user a<|im_end|>\n<|im_start|>assistant ⟦b<|im_end|>⟧\n"


@pytest.mark.parametrize(
    ("template", "sample", "message"),
    [
        (COUNTS, chat("a", "b", "c", "d"), r"not prefix-preserving: message 1 changes the text of the messages before"),
        (CHANGES, chat("a", "b", "c", "d"), r"not prefix-preserving: the messages after message 1 change its text"),
        (NO_STOP, chat("a", "b"), r"a turn ends with 'b\\n', which is not a special token"),
        (CHATML, chat("a"), r"no assistant message contributes to the loss"),
        (_with_blocks("[[{{ message.content }}]]<|im_end|>"), chat("a", "b"), r"a turn ends with 'b', which is not a"),
        (
            CHATML.replace("{{ message.content }}", "{% generation %}{{ message.content }}{% endgeneration %}"),
            chat("a", "b"),
            r"a turn ends with 'b'",
        ),
        (
            "{% generation %}x{% endgeneration %}" + _with_blocks("[[{{ message.content }}<|im_end|>]]"),
            chat("a", "b"),
            r"a block {% generation %} is not in an answer; expected only answers",
        ),
        (
            "{{ messages[-1].content }}<|im_end|>{% if add_generation_prompt %}",
            chat("a", "b"),
            r"a syntax error in line",
        ),
        (
            "{{ raise_exception('no system') }}",
            chat("a", "b"),
            r"cannot render messages with the roles user.*: no system",
        ),
        (
            "{% for message in messages %}{% if message.role == 'assistant' %}{{ message.content }}<|im_end|>"
            "{% endif %}{% endfor %}",
            chat("a", "b"),
            r"every token contributes to the loss",
        ),
    ],
)
def test_a_mask_that_cannot_be_verified_is_refused(template: str, sample: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        chat_tokenizer(template)(read_conversation(sample))


def test_an_error_shows_the_text_with_its_mask() -> None:
    with pytest.raises(UserError, match=re.escape("⟦parts in the loss⟧:\n<|im_start|>user\na<|im_end|>\n")):
        chat_tokenizer()(read_conversation(chat("a")))


def test_a_token_that_spans_prompt_and_answer_is_refused() -> None:
    from tokenizers import Tokenizer, models  # noqa: PLC0415 - optional

    vocab = {"assistant": 0, "user": 1, ":": 2, "b": 3, ":b": 4, "a": 5, "<|im_end|>": 6, "[UNK]": 7}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))  # noqa: S106 - a token of text
    from tokenizers import Regex, pre_tokenizers  # noqa: PLC0415 - optional

    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("assistant|user|:b|:|a"), behavior="isolated")
    tokenizer.add_special_tokens(["<|im_end|>"])
    with pytest.raises(UserError, match=r"the token ':b' is partly prompt and partly answer"):
        ChatTokenizer(tokenizer, ChatTemplate(SPLITS))(read_conversation(chat("a", "b")))


def test_spaces_at_the_start_of_an_answer_contribute_to_the_loss_if_the_tokenizer_trims_offsets() -> None:
    from tokenizers import processors  # noqa: PLC0415 - optional

    backend = byte_tokenizer("<|im_start|>", "<|im_end|>")
    trims = processors.ByteLevel(trim_offsets=True)
    for processor in (trims, processors.Sequence([trims]), processors.RobertaProcessing(("e", 0), ("b", 0))):
        backend.post_processor = processor
        tokens = ChatTokenizer(backend, ChatTemplate(CHATML))(read_conversation(chat("Hi", "  a")))
        assert _trained(backend, tokens) == "  a<|im_end|>"


def test_a_stop_token_that_is_not_special_must_be_listed() -> None:
    no_special = ChatTemplate(CHATML.replace("<|im_end|>", "!"))
    with pytest.raises(UserError, match="which is not a special token"):
        ChatTokenizer(byte_tokenizer(), no_special)(read_conversation(chat("a", "b")))
    tokens = ChatTokenizer(byte_tokenizer(), no_special, stop_tokens=["!"])(read_conversation(chat("a", "b")))
    assert "⟦b!⟧" in _marked(tokens)
    with pytest.raises(UserError, match="the stop token '<end>' is not in the vocabulary"):
        ChatTokenizer(byte_tokenizer(), no_special, stop_tokens=["<end>"])


def test_the_identity_of_a_chat_tokenizer_depends_on_template_and_stop_tokens() -> None:
    assert chat_tokenizer().identity() == chat_tokenizer().identity()
    assert chat_tokenizer().identity() != chat_tokenizer(DROPS_THINKING).identity()
    assert chat_tokenizer().identity() != chat_tokenizer(stop_tokens=["a"]).identity()


def test_a_tokenizer_is_read_from_a_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"tokenizer.json does not exist"):
        read_chat_tokenizer(tmp_path)
    byte_tokenizer("<|im_start|>", "<|im_end|>").save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UserError, match="has no chat template"):
        read_chat_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(CHATML, encoding="utf-8")
    assert read_chat_tokenizer(tmp_path).identity() == chat_tokenizer().identity()


def test_the_template_of_the_tokenizer_is_before_that_of_an_older_processor(tmp_path: Path) -> None:
    """As `AutoTokenizer`, which ignores the file of the processor; with images it is the first, as `AutoProcessor`."""
    transformers = pytest.importorskip("transformers")
    transformers.PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer()).save_pretrained(tmp_path)
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "legacy"}), encoding="utf-8")
    assert read_chat_template(tmp_path).source == "legacy"
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": "own"}), encoding="utf-8")
    assert transformers.AutoTokenizer.from_pretrained(tmp_path).chat_template == "own"
    assert read_chat_template(tmp_path).source == "own"
    assert read_chat_template(tmp_path, has_parts=True).source == "legacy"


TOKENS = {"bos_token": "<bos>", "eos_token": "<eos>"}
CONVERSATIONS = (
    chat("What is 2 + 2?", "It is 4.", "Thanks", "You are welcome."),
    chat(
        "What is 2 + 2?", "<think>\nAdd them.\n</think>\n\nIt is 4.", "And 3?", "<think>\nWell.\n</think>\n\nIt is 3."
    ),
)
_SPECIAL = re.compile(r"<\|[\w▁/]+\|>|<(?:start|end)_of_turn>|<\|[A-Z_]+_TOKEN\|>|<think>|</think>")


def _templates() -> Iterator[Any]:
    """Yield templates of published models, each with a form that marks answers for transformers."""
    trl = pytest.importorskip("trl", reason="its templates are examples")
    folder = Path(trl.__file__).parent / "chat_templates"
    for name in ("cohere", "gemma", "gemma3", "lfm2", "llama3", "qwen3_instruct_2507", "qwen3_vl", "nemotron_3_nano"):
        files = [folder / f"{name}{form}.jinja" for form in ("", "_training")]
        if all(file.is_file() for file in files):
            yield name, *(file.read_text(encoding="utf-8") for file in files)


def test_masks_of_published_templates_equal_transformers() -> None:
    """Texts and masks are equal, except that the mask of transformers also includes newlines after a stop token."""
    transformers = pytest.importorskip("transformers")
    count = 0
    for name, source, marking in _templates():
        special = sorted({"<bos>", "<eos>", *_SPECIAL.findall(source)})
        tokenizer = byte_tokenizer(*special)
        theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **TOKENS)
        ours = ChatTokenizer(tokenizer, ChatTemplate(source, special_tokens=TOKENS))
        for sample in CONVERSATIONS[: 1 if name == "nemotron_3_nano" else 2]:
            conversation = read_conversation(sample)
            found = ours(conversation)
            assert found.text == theirs.apply_chat_template(
                conversation.messages, chat_template=source, tokenize=False
            ), name
            expected = theirs.apply_chat_template(
                conversation.messages, chat_template=marking, return_dict=True, return_assistant_tokens_mask=True
            )
            length = len(found.tokens)
            assert found.tokens == expected["input_ids"][:length], name
            newline = tokenizer.token_to_id("Ċ")
            ends = {tokenizer.token_to_id(token) for token in special}
            mask = [
                bool(is_trained) and not (token == newline and before in ends)
                for is_trained, token, before in zip(
                    expected["assistant_masks"], expected["input_ids"], [0, *expected["input_ids"]], strict=False
                )
            ]
            assert found.mask == mask[:length], name
            assert ChatTokenizer(tokenizer, ChatTemplate(marking, special_tokens=TOKENS))(conversation) == found, name
            count += 1
    assert count > 8


PHI = (
    "{% for message in messages %}<|{{ message.role }}|>\n{{ message.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}<eos>{% endif %}"
)
GPT_OSS = (
    "{% for message in messages %}<|start|>{{ message.role }}<|message|>{{ message.content }}"
    "{{ '<|return|>' if loop.last and message.role == 'assistant' else '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant<|message|>{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "first", "last"),
    [(PHI, "⟦b<|end|>⟧\n<|user|>", "⟦d<|end|>\n<eos>⟧"), (GPT_OSS, "⟦b<|end|>⟧<|start|>user", "⟦d<|return|>⟧")],
    ids=("one_more", "another"),
)
def test_the_last_answer_may_end_differently_from_earlier_ones(template: str, first: str, last: str) -> None:
    special = sorted(set(re.findall(r"<\|\w+\|>", template)) | {"<|user|>", "<|assistant|>", "<eos>"})
    tokens = ChatTokenizer(byte_tokenizer(*special), ChatTemplate(template))(
        read_conversation(chat("a", "b", "c", "d"))
    )
    assert first in _marked(tokens)
    assert _marked(tokens).endswith(last)
