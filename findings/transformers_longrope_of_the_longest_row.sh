#!/usr/bin/env bash
# transformers: with LongRoPE, the logits of a short row change when a long row is in its batch.
# Expected: Rows of a batch do not affect each other, as with the RoPE types default, linear and yarn.
# Happens: The whole batch has the long factors if its longest row, with its padding, exceeds the original length. So
#   losses and texts of short rows depend on the batch that they are in. The type "dynamic" differs likewise.
# Versions: transformers 5.23.0, torch 2.15.0, numpy 2.4.6, Python 3.11; seen on 2026-11-30.
# Output seen:
#   transformers 5.23.0
#   yarn: rows of 6 tokens alone and beside a row of 12 tokens have equal logits: True
#   longrope: rows of 6 tokens alone and beside a row of 12 tokens have equal logits: False
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
uv venv --quiet --python 3.11 "$folder/env"
uv pip install --quiet --python "$folder/env/bin/python" transformers==5.23.0 torch==2.15.0 numpy==2.4.6
"$folder/env/bin/python" - <<'PYTHON'
import torch
import transformers

print("transformers", transformers.__version__)
SCALINGS = {
    "yarn": {"original_max_position_embeddings": 8},
    "longrope": {
        "original_max_position_embeddings": 8,
        "short_factor": [1.0] * 4,
        "long_factor": [1.0, 2.0, 3.0, 4.0],
    },
}
for name, entries in SCALINGS.items():
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=16,
        rope_parameters={"rope_type": name, "rope_theta": 10000.0, "factor": 2.0, **entries},
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).double().eval()
    rows = torch.randint(32, (2, 12))
    mask = torch.ones_like(rows)
    mask[0, 6:] = 0  # the first row has 6 tokens
    with torch.no_grad():
        alone = model(rows[:1, :6], attention_mask=mask[:1, :6]).logits[0]
        together = model(rows, attention_mask=mask).logits[0, :6]
    is_equal = torch.allclose(alone, together, rtol=1e-9, atol=1e-9)
    print(f"{name}: rows of 6 tokens alone and beside a row of 12 tokens have equal logits: {is_equal}")
    assert is_equal == (name == "yarn"), "changed"
PYTHON
