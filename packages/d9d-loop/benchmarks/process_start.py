"""Time from the start of a process to its first optimizer step, of imports, and of `d9d-plan`, as whole commands.

    python packages/d9d-loop/benchmarks/process_start.py
    python packages/d9d-loop/benchmarks/process_start.py --only imports --repeats 5

Each is a process of its own with cached bytecode; the processes of a row alternate, every other round in reverse order.

- `start`: the MLP of `step_overhead.py`, trained by the `Trainer` with its defaults, a plain loop and Accelerate.
- `imports`: all public names of each package, after `import torch`. The peer imports the modules of torch that these
  names loaded, in the same order. `torch and others` adds those of other libraries.
- `plan`: `d9d-plan` of `examples/plan_qwen3_30b.toml`, and of a batch that does not fit. The peer imports the modules
  of torch that a step of such a job needs: FSDP2, DTensor, and dynamo, which `torch.optim` imports.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = ("dist", "state", "modules", "moe", "peft", "pipeline", "metrics", "loop")
CLOCK = "import time; at, busy = time.monotonic(), time.process_time()"
FIRST_STEP = "import json, time; print(json.dumps([time.monotonic(), time.process_time()])); raise SystemExit"
START = {
    "plain": f"""
import torch
from torch import nn
from torch.nn import functional as F
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
samples = [{{"x": torch.randn(64), "y": torch.randn(1)}} for _ in range(64)]
for batch in torch.utils.data.DataLoader(samples, batch_size=16):
    F.mse_loss(model(batch["x"]), batch["y"]).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    {FIRST_STEP}
""",
    "accelerate": f"""
import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional as F
torch.set_num_threads(1)
accelerator = Accelerator(cpu=True)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
samples = [{{"x": torch.randn(64), "y": torch.randn(1)}} for _ in range(64)]
model, optimizer, loader = accelerator.prepare(
    model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True),
    torch.utils.data.DataLoader(samples, batch_size=16),
)
for batch in loader:
    accelerator.backward(F.mse_loss(model(batch["x"]), batch["y"]))
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    {FIRST_STEP}
""",
    "d9d": """
import os
import torch
from torch import nn
from torch.nn import functional as F
from d9d_loop import Loss, OptimizerDone, Task, Trainer, TrainerConfig
torch.set_num_threads(1)
class Regression(Task):
    def inputs(self, batch):
        return {"input": batch["x"]}
    def loss(self, outputs, batch):
        return Loss(F.mse_loss(outputs, batch["y"], reduction="sum"), weight=outputs.numel())
config = TrainerConfig.model_validate({
    "steps": 1, "batch": {"global_size": 16}, "run": {"folder": "job"}, "optimizer": {"learning_rate": 1e-3},
    "gradients": {"max_norm": 1.0},
})
samples = [{"x": torch.randn(64), "y": torch.randn(1)} for _ in range(64)]
build = lambda stage: nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
trainer = Trainer(config, model=build, data=samples, task=Regression())
def stop(event):
    import json, time
    os.write(1, b"\\n" + json.dumps([time.monotonic(), time.process_time()]).encode())  # no rank before the line
    os._exit(0)
trainer.events.on(OptimizerDone, stop)
trainer.train()
""",
}
IMPORT = f"""
import json, sys, time, importlib
import torch
before = set(sys.modules)
{CLOCK}
package = importlib.import_module(sys.argv[1])
for name in package.__all__:
    getattr(package, name)
end, ended = time.monotonic(), time.process_time()
loaded = [name for name in sys.modules if name not in before]
print(json.dumps([end - at, ended - busy, loaded]))
"""
PLAN_IMPORTS = "import torch, torch.distributed.fsdp, torch.distributed.tensor, torch._dynamo"
AGAIN = f"""
import json, sys, time, importlib
import torch
names = json.load(sys.stdin)
{CLOCK}
for name in names:
    importlib.import_module(name)
end, ended = time.monotonic(), time.process_time()
print(json.dumps([end - at, ended - busy]))
"""


def run(words: list[str], text: str = "", code: int = 0, folder: str | None = None) -> tuple[float, float, Any]:
    """Run a command; return wall and CPU seconds of the whole process, and the JSON that it printed."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment |= {"OMP_NUM_THREADS": "1", "D9D_DEVICE": "cpu"}
    before, begin = os.times(), time.monotonic()
    done = subprocess.run(  # noqa: S603
        words, input=text, capture_output=True, text=True, check=False, env=environment, cwd=folder
    )
    wall, after = time.monotonic() - begin, os.times()
    if done.returncode != code:
        raise SystemExit(f"{words} ended with code {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    lines = [line for line in done.stdout.splitlines() if line.startswith("[")]
    printed = json.loads(lines[-1]) if lines else None
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return wall, cpu, (begin, printed)


def start(name: str) -> tuple[float, float]:
    """Return wall and CPU seconds from the start of a process to its first step."""
    with tempfile.TemporaryDirectory() as folder:
        _, _, (begin, (at, busy)) = run([sys.executable, "-c", START[name]], folder=folder)
    return at - begin, busy


def alternate(calls: dict[str, Callable[[], tuple[float, float]]], repeats: int) -> dict[str, Any]:
    """Return the medians of wall and CPU seconds, and the ratios to the first call of the same round."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for repeat in range(repeats + 1):
        for name in [*calls][:: -1 if repeat % 2 else 1]:
            both = calls[name]()
            if repeat:  # the first round writes bytecode
                found[name].append(both)
    base, *others = calls
    result: dict[str, Any] = {}
    for index, what in enumerate(("wall", "cpu")):
        times = {name: [each[index] for each in values] for name, values in found.items()}
        result[f"seconds of {what}"] = {name: round(statistics.median(each), 3) for name, each in times.items()}
        pairs = {name: [a / b for a, b in zip(times[name], times[base], strict=True)] for name in others}
        result[f"ratio of {what} to {base}"] = {name: round(statistics.median(each), 3) for name, each in pairs.items()}
        result[f"quartiles of {what} to {base}"] = {
            name: [round(value, 3) for value in statistics.quantiles(each, n=4)] for name, each in pairs.items()
        }
    return result


def imports(package: str, repeats: int) -> dict[str, Any]:
    """Compare the import of all names of a package with that of the modules of torch that they load."""
    words = [sys.executable, "-c", IMPORT, package]
    loaded = run(words)[2][1][2]
    torchs = [name for name in loaded if name.split(".")[0] == "torch"]

    def ours() -> tuple[float, float]:
        wall, cpu, _ = run(words)[2][1]
        return wall, cpu

    def again(names: list[str]) -> tuple[float, float]:
        wall, cpu = run([sys.executable, "-c", AGAIN], json.dumps(names))[2][1]
        return wall, cpu

    own = [name for name in loaded if name.split(".")[0].startswith("d9d")]
    # What torch's modules load of the standard library belongs to them, so it is measured with them.
    others = [
        name for name in loaded if name not in {*own, *torchs} and name.split(".")[0] not in sys.stdlib_module_names
    ]
    calls = {
        "torch": lambda: again(torchs),
        "torch and others": lambda: again([*torchs, *others]),
        "package": ours,
    }
    if not torchs:
        del calls["torch"]
    return {"modules": {"own": len(own), "torch": len(torchs), "others": len(others)}, **alternate(calls, repeats)}


def plan(repeats: int) -> dict[str, Any]:
    """Measure `d9d-plan` for two clusters, and for a batch that does not fit its ranks."""
    job = str(ROOT / "examples" / "plan_qwen3_30b.toml")
    words = [sys.executable, "-m", "d9d_loop.planning", job, "--hardware", "h100-dgx"]

    def of(ranks: int, batch: int, code: int = 0) -> Callable[[], tuple[float, float]]:
        sizes = ["--world-size", str(ranks), "--batch.global_size", str(batch)]
        return lambda: run([*words, *sizes], code=code, folder=str(ROOT))[:2]

    return alternate(
        {
            "imports of torch": lambda: run([sys.executable, "-c", PLAN_IMPORTS])[:2],
            "1,024 ranks": of(1024, 1024),
            "131,072 ranks": of(131072, 131072),
            "wrong batch": of(1024, 1000, 2),
        },
        repeats,
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--only", choices=("start", "imports", "plan"), nargs="+", default=["start", "imports", "plan"])
    arguments = parser.parse_args()
    result: dict[str, Any] = {}
    if "start" in arguments.only:
        result["start"] = alternate({name: lambda name=name: start(name) for name in START}, arguments.repeats)
    if "imports" in arguments.only:
        result["imports"] = {name: imports(f"d9d_{name}", arguments.repeats) for name in PACKAGES}
    if "plan" in arguments.only:
        result["plan"] = plan(arguments.repeats)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
