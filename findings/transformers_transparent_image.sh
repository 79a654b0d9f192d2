#!/usr/bin/env bash
# transformers: a transparent image has a white ground or a black one, by the way in which it is passed.
# Expected: An image processor gives the same pixels for a file and for the image that Pillow opens from it.
# Happens: The processor pastes an image of Pillow with an alpha channel over white. load_image, and fetch_images
#   for paths, drop the alpha channel instead and keep the color below it, which most programs store as black: a
#   black drawing on a transparent ground becomes a black area.
# Versions: transformers 5.23.0, torch 2.15.0, torchvision 0.29.2, pillow 13.0.0, numpy 2.4.6, Python 3.11; seen on
#   2026-11-30.
# Output seen:
#   transformers 5.23.0
#   pixels of a transparent image, an image of Pillow: 1.0
#   pixels of a transparent image, its path: 0.0
#   pixels of a transparent image, load_image of its path: 0.0
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
uv venv --quiet --python 3.11 "$folder/env"
uv pip install --quiet --python "$folder/env/bin/python" transformers==5.23.0 torch==2.15.0 torchvision==0.29.2 \
    pillow==13.0.0 numpy==2.4.6
"$folder/env/bin/python" - 2>/dev/null <<'PYTHON'
import tempfile
from pathlib import Path

import transformers
from PIL import Image
from transformers import Qwen2VLImageProcessor
from transformers.image_utils import load_image

print("transformers", transformers.__version__)
size = {"shortest_edge": 56 * 56, "longest_edge": 56 * 56}
processor = Qwen2VLImageProcessor(do_normalize=False, size=size)
with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "drawing.png"
    Image.new("RGBA", (56, 56), (0, 0, 0, 0)).save(path)
    images = {
        "an image of Pillow": Image.open(path),
        "its path": processor.fetch_images(str(path)),
        "load_image of its path": load_image(str(path)),
    }
    for name, image in images.items():
        pixels = processor(images=[image], return_tensors="pt")["pixel_values"]
        print(f"pixels of a transparent image, {name}: {pixels.min().item()}")
        expected = 1.0 if name == "an image of Pillow" else 0.0
        assert pixels.min().item() == pixels.max().item() == expected, "changed"
PYTHON
