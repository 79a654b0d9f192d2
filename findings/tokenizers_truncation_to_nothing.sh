#!/usr/bin/env bash
# tokenizers: A truncation shorter than the special tokens truncates nothing.
# Expected: max_length below the number of special tokens raises, or leaves only special tokens.
# Happens: With two special tokens, max_length 2 leaves exactly these; max_length 1 and 0 return the whole
#   text, however long. A limit computed as the room that is left over thus lifts itself when no room is left.
# Versions: tokenizers 0.23.3, Python 3.11; seen on 2026-11-28.
# Output seen:
#   tokenizers 0.23.3
#   max_length 3: [CLS] a [SEP]
#   max_length 2: [CLS] [SEP]
#   max_length 1: [CLS] a b c d [SEP]
#   max_length 0: [CLS] a b c d [SEP]
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
uv venv --quiet --python 3.11 "$folder/env"
uv pip install --quiet --python "$folder/env/bin/python" tokenizers==0.23.3
"$folder/env/bin/python" - <<'PYTHON'
import tokenizers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

print("tokenizers", tokenizers.__version__)
words = ["[UNK]", "[CLS]", "[SEP]", "a", "b", "c", "d"]
tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer.post_processor = processors.TemplateProcessing(
    single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
)
lengths = {}
for limit in (3, 2, 1, 0):
    tokenizer.enable_truncation(limit)
    tokens = tokenizer.encode("a b c d").tokens
    print(f"max_length {limit}:", *tokens)
    lengths[limit] = len(tokens)
assert lengths == {3: 3, 2: 2, 1: 6, 0: 6}, f"changed: {lengths}"
PYTHON
