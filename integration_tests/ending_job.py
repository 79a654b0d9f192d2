"""Script of a job that ends in a chosen way and phase, for `ended_jobs`: the quickstart with an evaluation.

HOW names the end, AT the phase, and ON the rank. The run folder is in the current folder.
"""

import multiprocessing
import os
import signal
import socket
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

_RANK = os.environ.get("RANK", "0")
_IS_LAUNCHED = "TORCHELASTIC_RUN_ID" in os.environ
# Files that are opened in the middle of the second save, and of the export.
_FILES = {"step-00000004.partial/state.json": "in a save", "export.partial/model.safetensors": "in an export"}


def _act(phase: str) -> None:
    """End the job as HOW says if this is the phase AT on the rank ON, once."""
    workers = [str(child.pid) for child in multiprocessing.active_children()]
    Path(f"{os.getpid()}.pids").write_text("\n".join([str(os.getpid()), *workers]), encoding="ascii")
    if (phase, _RANK) != (os.environ["AT"], os.environ["ON"]):
        return
    os.environ["AT"] = ""
    how = os.environ["HOW"]
    if how.startswith("SIG"):
        _send(signal.Signals[how])
    elif how == "cut store":
        _cut_store()
    elif how == "exit":
        os._exit(3)
    elif how == "user error":
        from d9d_dist import UserError  # noqa: PLC0415 - imported only in this phase

        raise UserError("got x, expected y")
    elif how == "exception":
        raise KeyError("x")
    if how in ("lost launcher", "lost node"):
        os.kill(os.getppid(), signal.SIGKILL)
    if how == "lost launcher" and phase == "start":
        threading.Event().wait(60)  # the watch of the launcher ends this process
    if how in ("kill", "lost node"):
        os.kill(os.getpid(), signal.SIGKILL)


def _send(number: signal.Signals) -> None:
    """Send a signal to the launcher, and wait until it has forwarded the signal; without a launcher, to this process.

    torchrun does not forward SIGUSR1, which kills it.
    """
    if not _IS_LAUNCHED or ("D9D_LAUNCHER" not in os.environ and number == signal.SIGUSR1):
        os.kill(os.getppid() if _IS_LAUNCHED else os.getpid(), number)
        return
    is_received = threading.Event()
    before: Any = signal.getsignal(number)

    def receive(*arguments: Any) -> None:
        is_received.set()
        before(*arguments)

    if threading.current_thread() is not threading.main_thread():
        os.kill(os.getppid(), number)
        return
    if callable(before) and before is not signal.default_int_handler:
        signal.signal(number, receive)
    os.kill(os.getppid(), number)
    is_received.wait(60)


def _cut_store() -> None:
    """Cut the connections of this process to the job's store."""
    for path in list(Path("/proc/self/fd").iterdir()):
        with suppress(OSError), socket.socket(fileno=os.dup(int(path.name))) as connection:
            if connection.getpeername()[1:2] == (int(os.environ["MASTER_PORT"]),):
                connection.shutdown(socket.SHUT_RDWR)


def _notice_files(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open":
        for name, phase in _FILES.items():
            if str(arguments[0]).endswith(name):
                _act(phase)


def _train() -> None:
    from quickstart import Mlp, Regression, make_dataset  # noqa: PLC0415 - after the phase of imports

    from d9d_loop import (  # noqa: PLC0415
        CheckpointStarted,
        ConfigReady,
        EvaluationStarted,
        ModelExported,
        StepDone,
        Trainer,
        TrainerConfig,
    )

    config, data = TrainerConfig.from_cli("quickstart.toml"), make_dataset()
    trainer = Trainer(config, model=lambda stage: Mlp(), data=data, evaluation_data=data[:8], task=Regression())
    phases = {
        ConfigReady: "start",
        StepDone: "first step",
        EvaluationStarted: "evaluation",
        CheckpointStarted: "save",
        ModelExported: "export",
    }
    for event, phase in phases.items():
        trainer.events.on(event, lambda _, phase=phase: _act(phase))
    sys.addaudithook(_notice_files)
    trainer.train()


if __name__ == "__main__":
    from d9d_loop import cli_main

    with cli_main():
        _act("imports")
        _train()
