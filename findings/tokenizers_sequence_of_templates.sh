#!/usr/bin/env bash
# tokenizers: Two post-processor templates in a sequence lose the second one's tokens.
# Expected: Sequence([template that adds [CLS], template that adds [SEP]]) adds both, as the length that it
#   reports says.
# Happens: The first template hands on two pieces, [CLS] and the text; the second takes these for a pair of
#   texts and applies its (empty) template for pairs. [SEP] is never added, though num_special_tokens_to_add
#   counts it and truncation leaves room for it. A real pair loses both tokens.
# Versions: tokenizers 0.23.3, Python 3.11; seen on 2026-11-28.
# Output seen:
#   tokenizers 0.23.3
#   one text:     [CLS] a b
#   added tokens: 2 by its own count
#   limit of 3:   [CLS] a
#   a pair:       a b
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
tokenizer.post_processor = processors.Sequence(
    [
        processors.TemplateProcessing(single="[CLS] $A", special_tokens=[("[CLS]", 1)]),
        processors.TemplateProcessing(single="$A [SEP]", special_tokens=[("[SEP]", 2)]),
    ]
)
one = tokenizer.encode("a b").tokens
count = tokenizer.num_special_tokens_to_add(False)
pair = tokenizer.encode("a", "b").tokens
tokenizer.enable_truncation(3)
limited = tokenizer.encode("a b c d").tokens
print("one text:    ", *one)
print("added tokens:", count, "by its own count")
print("limit of 3:  ", *limited)
print("a pair:      ", *pair)
assert (one, count, limited) == (["[CLS]", "a", "b"], 2, ["[CLS]", "a"]), "changed: one text"
assert pair == ["a", "b"], "changed: a pair"
PYTHON
