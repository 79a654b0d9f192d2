"""Data of the examples of post-training: questions about functions, answered by their docstrings; each byte a token."""

import ast
import re
from contextlib import suppress

from source_text import Text
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from d9d_loop.data import ChatTemplate, ChatTokenizer

WORDINGS = ("What does {} do?", "What is {} for?", "Explain {}.")
LONGEST = 100  # bytes of an answer
_END = "<|end|>"
_TEMPLATE = """{%- for message in messages -%}
{{ ('Q: ' + message.content if message.role == 'user' else 'A: ' + message.content + '<|end|>') + '\n' }}
{%- endfor -%}
{{- 'A: ' if add_generation_prompt else '' -}}"""


def byte_chat() -> ChatTokenizer:
    """Return a byte tokenizer as in pretrain.py; byte 0, which the text does not contain, ends an answer."""
    printable = {
        *range(33, 127),
        *range(161, 173),
        *range(174, 256),
    }  # the others are written as characters from 256 on
    others = [byte for byte in range(256) if byte not in printable]
    vocab = {chr(256 + others.index(byte)) if byte in others else chr(byte): byte for byte in range(1, 256)}
    tokenizer = Tokenizer(models.BPE(vocab={_END: 0, **vocab}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(_END, special=True)])
    return ChatTokenizer(tokenizer, ChatTemplate(_TEMPLATE))


def documented(text: Text) -> dict[str, str]:
    """Return the first sentence of the docstring of each public function, by `module.function`."""
    found = {}
    for path in sorted(text.folder.glob(text.pattern)):
        with suppress(SyntaxError):  # some files of lib2to3 contain syntax errors on purpose
            for node in ast.parse(path.read_bytes()).body:
                if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                    paragraph = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
                    sentence = re.split(r"(?<=\.)\s", paragraph)[0]
                    if 10 < len(sentence) <= LONGEST and sentence.endswith("."):
                        found[f"{path.stem}.{node.name}"] = sentence
    return found
