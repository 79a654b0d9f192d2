#!/usr/bin/env bash
# transformers: The assistant mask of a chat depends on the first and last character of each block.
# Expected: return_assistant_tokens_mask marks the tokens of each generation block that are in the result, and
#   no others.
# Happens: A block whose first character has no token ends the marking, for all later turns too: truncation on
#   the left, which cuts the first answer, leaves zeros though the last answer is whole, and so does a leading
#   space that the tokenizer drops. A block that ends with a dropped space marks all that follows, the user's
#   turns too.
# Versions: transformers 5.23.0, jinja2 3.1.6, numpy 2.4.6, Python 3.11; seen on 2026-11-28.
# Output seen:
#   transformers 5.23.0
#   whole:            yes </a> well </a>
#   truncated, right: yes
#   truncated, left:  nothing, of </a> <u> you <a> well </a>
#   leading space:    nothing, of <u> hi <a> yes </a> <u> you <a> well </a>
#   trailing space:   yes </a> <u> you <a> well </a>
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
uv venv --quiet --python 3.11 "$folder/env"
uv pip install --quiet --python "$folder/env/bin/python" transformers==5.23.0 jinja2==3.1.6 numpy==2.4.6
"$folder/env/bin/python" - <<'PYTHON'
import logging

import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

logging.disable(logging.WARNING)
print("transformers", transformers.__version__)
words = ["[UNK]", "<pad>", "<u>", "<a>", "</a>", "hi", "you", "well", "yes"]
tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' %}<u> {{ m.content }} {% else %}<a> "
    "{% generation %}{{ m.content }} </a>{% endgeneration %} {% endif %}{% endfor %}"
)


def marked(first="yes", template=TEMPLATE, side="right", **options):
    chat = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", chat_template=template)
    chat.truncation_side = side
    turns = [("user", "hi"), ("assistant", first), ("user", "you"), ("assistant", "well")]
    messages = [{"role": role, "content": content} for role, content in turns]
    result = chat.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True, **options)
    tokens = chat.convert_ids_to_tokens(result["input_ids"])
    chosen = [token for token, is_marked in zip(tokens, result["assistant_masks"], strict=True) if is_marked]
    return " ".join(chosen) or "nothing, of " + " ".join(tokens)


space_inside = TEMPLATE.replace("{% endgeneration %} ", " {% endgeneration %}")
cases = {
    "whole": (marked(), "yes </a> well </a>"),
    "truncated, right": (marked(truncation=True, max_length=4), "yes"),
    "truncated, left": (marked(truncation=True, max_length=6, side="left"), "nothing, of </a> <u> you <a> well </a>"),
    "leading space": (marked(first=" yes"), "nothing, of <u> hi <a> yes </a> <u> you <a> well </a>"),
    "trailing space": (marked(template=space_inside), "yes </a> <u> you <a> well </a>"),
}
for name, (seen, stated) in cases.items():
    print(f"{name + ':':17}", seen)
    assert seen == stated, f"changed: {name}"
PYTHON
