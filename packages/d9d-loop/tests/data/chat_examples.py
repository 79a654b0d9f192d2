"""A tokenizer and a chat template for tests."""

from typing import Any

from d9d_loop.data import ChatTemplate, ChatTokenizer

CHATML = """{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def byte_tokenizer(*special: str) -> Any:
    """Return a tokenizer of bytes, with special tokens after them."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers  # noqa: PLC0415 - optional

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={each: number for number, each in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    return tokenizer


def chat_tokenizer(template: str = CHATML, **options: Any) -> ChatTokenizer:
    return ChatTokenizer(byte_tokenizer("<|im_start|>", "<|im_end|>"), ChatTemplate(template), **options)


def chat(*contents: str, **more: Any) -> dict[str, Any]:
    """Return a sample of user and assistant messages in turn."""
    roles = ("user", "assistant")
    messages = [{"role": roles[number % 2], "content": content} for number, content in enumerate(contents)]
    return {"messages": messages, **more}


def chats(count: int) -> list[dict[str, Any]]:
    """Return conversations of different lengths."""
    return [chat("ask " * (1 + n % 3), f"answer {n} " * (1 + n * 7 % 5)) for n in range(count)]
