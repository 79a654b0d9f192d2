#!/usr/bin/env bash
# tokenizers: A special token wins over a longer added token that starts with it.
# Expected: Added tokens match the longest one first, as they do among themselves.
# Happens: Tokens are matched in two passes: first those that are not normalised, which special tokens are by
#   default, then the others. With a special token <tool> and an added token <tool>s the longer one is never
#   produced, in whatever order they were added; it is when both are of the same kind.
# Versions: tokenizers 0.23.3, Python 3.11; seen on 2026-11-28.
# Output seen:
#   tokenizers 0.23.3
#   both plain:                  <tool>s
#   special, then plain longer:  <tool> [UNK]
#   plain longer, then special:  <tool> [UNK]
#   both special:                <tool>s
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
uv venv --quiet --python 3.11 "$folder/env"
uv pip install --quiet --python "$folder/env/bin/python" tokenizers==0.23.3
"$folder/env/bin/python" - <<'PYTHON'
import tokenizers
from tokenizers import Tokenizer, models

print("tokenizers", tokenizers.__version__)


def tokens(*added):
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    for text, special in added:
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)([text])
    return tokenizer.encode("<tool>s").tokens


short, longer = "<tool>", "<tool>s"
cases = {
    "both plain": (tokens((short, False), (longer, False)), [longer]),
    "special, then plain longer": (tokens((short, True), (longer, False)), [short, "[UNK]"]),
    "plain longer, then special": (tokens((longer, False), (short, True)), [short, "[UNK]"]),
    "both special": (tokens((short, True), (longer, True)), [longer]),
}
for name, (seen, stated) in cases.items():
    print(f"{name + ':':28}", *seen)
    assert seen == stated, f"changed: {name}"
PYTHON
