#!/usr/bin/env bash
# transformers: of two chat templates in a folder, the processor reads one and the tokenizer the other.
# Expected: A folder has one chat template. chat_template.jinja is the present form, so it replaces an older
#   chat_template.json that a copy of the folder still has; or two different ones are an error.
# Happens: AutoProcessor takes chat_template.json, and AutoTokenizer of the same folder chat_template.jinja. So the
#   prompt of the processor differs from that of its own tokenizer, without a warning. A key chat_template in
#   processor_config.json also goes before the .jinja, with a warning.
# Versions: transformers 5.23.0, torch 2.15.0, torchvision 0.29.2, pillow 13.0.0, numpy 2.4.6, Python 3.11; seen on
#   2026-11-30.
# Output seen:
#   transformers 5.23.0
#   chat_template.jinja: processor 'of the .jinja', tokenizer 'of the .jinja'
#   and chat_template.json: processor 'of the .json', tokenizer 'of the .jinja'
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
uv venv --quiet --python 3.11 "$folder/env"
uv pip install --quiet --python "$folder/env/bin/python" transformers==5.23.0 torch==2.15.0 torchvision==0.29.2 \
    pillow==13.0.0 numpy==2.4.6
"$folder/env/bin/python" - 2>/dev/null <<'PYTHON'
import json
import tempfile
from pathlib import Path

import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoProcessor, AutoTokenizer, CLIPImageProcessor, LlavaProcessor, PreTrainedTokenizerFast

print("transformers", transformers.__version__)
made = Tokenizer(models.WordLevel({"<image>": 0, "new": 1, "old": 2, "[UNK]": 3}, unk_token="[UNK]"))
made.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[UNK]", additional_special_tokens=["<image>"])
chat = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]


def prompts(folder):
    return [
        kind.from_pretrained(folder).apply_chat_template(chat, tokenize=False)
        for kind in (AutoProcessor, AutoTokenizer)
    ]


with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    processor = LlavaProcessor(CLIPImageProcessor(), tokenizer, patch_size=14, chat_template="of the .jinja")
    processor.save_pretrained(folder)
    seen = [prompts(folder)]
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "of the .json"}))
    seen.append(prompts(folder))
print("chat_template.jinja: processor {!r}, tokenizer {!r}".format(*seen[0]))
print("and chat_template.json: processor {!r}, tokenizer {!r}".format(*seen[1]))
assert seen == [["of the .jinja"] * 2, ["of the .json", "of the .jinja"]], "changed"
PYTHON
