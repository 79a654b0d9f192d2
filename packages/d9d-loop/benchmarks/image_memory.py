"""Host memory of the workers that decode images, compared with the images and pixels that are in flight.

    python packages/d9d-loop/benchmarks/image_memory.py

Prints JSON, in MiB: the private memory of two workers with one small batch each (`base`), which does not depend on the
images, and the sum of their peaks above it, which need not be at the same time; the decoded images (3 bytes a pixel) of
the batches that they read at that time; and the pixels of these images as the model gets them: 24 bytes a pixel, as
float32 and for two frames. Released models have patches of 14 pixels; those of 4 pixels show the memory of many tokens.
"""

import argparse
import json
import sys
import tempfile
import threading
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
import numpy as np
from PIL import Image
from torch import multiprocessing
from vision_cases import (  # ty: ignore[import-not-found] - beside the tests
    chat,
    image,
    save_model,
    text,
    vision_config,
)

from d9d_loop.data.batch_reader import read_batch
from d9d_loop.data.worker_pool import ReadJob, WorkerPool
from d9d_loop.jobs import NextToken, image_chats

NUM_WORKERS, NUM_BATCHES = 2, 8


class _Samples:
    def __init__(self, samples: Any) -> None:
        self._samples = samples

    def read(self, entry: Any) -> Any:
        """Read a sample."""
        return self._samples[entry]


def _private_bytes() -> list[int]:
    """Return the memory of each worker without files, and without the parts of what other processes also have."""
    found = []
    for worker in sorted(multiprocessing.active_children(), key=lambda each: each.name):
        lines = Path(f"/proc/{worker.pid}/smaps_rollup").read_text(encoding="utf-8").splitlines()
        found.append(sum(1024 * int(each.split()[1]) for each in lines if each.startswith(("Pss_Anon", "Pss_Shmem"))))
    return found


def measure(batch_size: int, side: int, patch_size: int) -> dict[str, float]:
    """Return the memory for batches of so many square images, with a token for 2 x 2 patches of a size in pixels."""
    with tempfile.TemporaryDirectory() as name:
        folder, chats = Path(name), [chat([image(number), text("what?")], "a cat") for number in range(batch_size + 1)]
        save_model("qwen2_5_vl", folder / "model")
        for file in ("processor_config.json", "preprocessor_config.json"):
            if (path := folder / "model" / file).is_file():
                values = json.loads(path.read_text(encoding="utf-8"))
                settings = values.get("image_processor", values)
                settings["patch_size"] = patch_size
                settings["size"] = {"shortest_edge": 16, "longest_edge": side * side}
                path.write_text(json.dumps(values), encoding="utf-8")
        (folder / "images").mkdir()
        for number in range(batch_size + 1):
            shape = (side, side, 3) if number else (32, 32, 3)
            pixels = np.random.default_rng(number).integers(0, 256, shape, dtype=np.uint8)
            Image.fromarray(pixels).save(folder / "images" / f"{number}.png")
        file = folder / "chats.jsonl"
        file.write_text("".join(json.dumps(each) + "\n" for each in chats), encoding="utf-8")
        dataset = {"files": [file], "length": 10**6}
        data = image_chats(
            vision_config(folder / "model", file, folder, dataset=dataset), lambda _: None, in_bytes=True
        )
        stream: Any = _Samples(data.samples)
        pool = WorkerPool(partial(read_batch, stream, data.collate, seed=0), num_workers=NUM_WORKERS)
        small, large = [0], list(range(1, batch_size + 1))
        jobs = (ReadJob(0, each) for each in chain([small] * 2 * NUM_WORKERS, [large] * NUM_BATCHES))
        batches = pool.batches(jobs)
        peaks, done = [0] * NUM_WORKERS, threading.Event()

        def watch() -> None:
            while not done.wait(0.002):
                peaks[:] = map(max, peaks, _private_bytes())

        for _ in range(NUM_WORKERS):
            next(batches)
        before = _private_bytes()
        thread = threading.Thread(target=watch)
        thread.start()
        pixel_bytes = 0
        for batch in batches:
            pixel_bytes = max(pixel_bytes, NextToken().inputs(batch)["pixel_values"].nbytes)
        done.set()
        thread.join()
        pool.close()
    images = NUM_WORKERS * batch_size * side * side * 3
    found = {"base": sum(before), "peak": sum(peaks) - sum(before), "images": images}
    found["pixels"] = NUM_WORKERS * pixel_bytes
    ratios = {f"ratio_to_{name}": found["peak"] / found[name] for name in ("images", "pixels")}
    return {key: round(each / 2**20, 1) for key, each in found.items()} | {k: round(v, 2) for k, v in ratios.items()}


def main() -> None:
    """Print the memory for several batches."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    cases = {
        f"{size} images of {side} x {side}, patches of {patch_size}": measure(size, side, patch_size)
        for size, side, patch_size in ((4, 512, 14), (8, 1024, 14), (8, 1024, 4))
    }
    print(json.dumps(cases, indent=2))


if __name__ == "__main__":
    main()
