#!/usr/bin/env bash
# tokenizers: Ids of added tokens in tokenizer.json are not what the loaded tokenizer uses.
# Expected: The file states an id for each added token, and loading keeps it; so one entry may be removed, or
#   placed after a gap.
# Happens: Added tokens that the model does not know are numbered again, densely, in the order of the file.
#   Removing one entry moves all later ones onto ids that the embeddings give to other tokens, and an id after
#   a gap is not kept either. Nothing is raised.
# Versions: tokenizers 0.23.3, Python 3.11; seen on 2026-11-28.
# Output seen:
#   tokenizers 0.23.3
#   as saved:         one 2, two 3, three 4
#   without two:      one 2, three 3 (the file says 4)
#   three moved to 9: one 2, two 3, three 4 (the file says 9)
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
uv venv --quiet --python 3.11 "$folder/env"
uv pip install --quiet --python "$folder/env/bin/python" tokenizers==0.23.3
"$folder/env/bin/python" - <<'PYTHON'
import json

import tokenizers
from tokenizers import Tokenizer, models

print("tokenizers", tokenizers.__version__)
tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
tokenizer.add_tokens(["one", "two", "three"])
ids = {each: tokenizer.token_to_id(each) for each in ("one", "two", "three")}
print("as saved:        ", ", ".join(f"{name} {index}" for name, index in ids.items()))
assert ids == {"one": 2, "two": 3, "three": 4}, "changed: the first ids"

removed = json.loads(tokenizer.to_str())
removed["added_tokens"] = [each for each in removed["added_tokens"] if each["content"] != "two"]
loaded = Tokenizer.from_str(json.dumps(removed))
stated = removed["added_tokens"][-1]["id"]
print(
    f"without two:      one {loaded.token_to_id('one')}, three {loaded.token_to_id('three')} (the file says {stated})"
)
assert stated == 4 and loaded.token_to_id("three") == 3, "changed: the stated id is kept"

moved = json.loads(tokenizer.to_str())
moved["added_tokens"][-1]["id"] = 9
loaded = Tokenizer.from_str(json.dumps(moved))
ids = ", ".join(f"{each} {loaded.token_to_id(each)}" for each in ("one", "two", "three"))
print(f"three moved to 9: {ids} (the file says 9)")
assert loaded.token_to_id("three") == 4 and loaded.id_to_token(9) is None, "changed: the stated id is kept"
PYTHON
