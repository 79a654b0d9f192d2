"""Fake accelerator: records the operations of a job in order, on a machine without an accelerator; computes nothing.

The device is torch's PrivateUse1 backend under the name "fakegpu". Operators have shapes, dtypes, FLOPs and bytes, but
no values; memory has sizes, but no contents. The C++ part is compiled at first use, which needs g++ and ninja.
"""

import hashlib
import importlib.util
import os
import shutil
import sys
import tempfile
import types
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Self, final

import torch
import torch.distributed as dist

from d9d_dist.errors import UserError
from fake_accelerator.device_log import KINDS, DeviceEntry, DeviceLog
from fake_accelerator.fake_ranks import BACKEND, FakeGroup
from fake_accelerator.operators import NAME, Operators
from fake_accelerator.triton_launches import record_triton_launches

_SOURCE = Path(__file__).parent / "fake_device.cpp"


def why_no_fake_accelerator() -> str | None:
    """Return the reason why this machine cannot install the fake accelerator, or `None` if it can."""
    missing = [tool for tool in ("g++", "ninja") if shutil.which(tool) is None]
    if missing:
        return f"the fake accelerator is compiled at first use, which needs {' and '.join(missing)}: apt install them"
    if torch.accelerator.is_available() and torch.accelerator.current_accelerator() != torch.device(NAME):
        return "this machine has an accelerator, and torch supports one type of accelerator in a process"
    return None


@final
class FakeAccelerator:
    """Accelerator of type "fakegpu" that computes nothing. Created by `install`, at most once in a process."""

    def __init__(self, extension: Any) -> None:
        self._extension, self._operators = extension, Operators(extension)

    @classmethod
    @cache
    def install(cls) -> Self:
        """Make the device torch's accelerator for the rest of this process.

        Compiles the C++ part once for each version of torch and Python, in about a minute. The environment variable
        `TORCH_EXTENSIONS_DIR` sets the folder of the cache.

        Raises:
            UserError: If g++ or ninja is missing, or the machine has an accelerator.
        """
        if (reason := why_no_fake_accelerator()) is not None:
            raise UserError(f"the fake accelerator is not available on this machine: {reason}.")
        torch.utils.rename_privateuse1_backend(NAME)
        torch._register_device_module(NAME, _device_module())
        installed = cls(_compiled())
        torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
        device_module: Any = torch.get_device_module(NAME)
        device_module.max_memory_allocated = lambda *_: installed._extension.peak_bytes()
        device_module.memory_allocated = lambda *_: installed._extension.allocated_bytes()
        device_module.reset_peak_memory_stats = lambda *_: installed._extension.reset_peak()
        record_triton_launches(installed._operators)
        dist.Backend.register_backend(BACKEND, installed._group, devices=["cpu", NAME])
        return installed

    def _group(self, store: Any, rank: int, size: int, timeout: Any) -> FakeGroup:
        del store, timeout
        return FakeGroup(rank, size, self._extension, self._operators)

    @property
    def allocated_bytes(self) -> int:
        """Bytes of device memory that are allocated now."""
        return self._extension.allocated_bytes()

    def answer(self, function: str, values: Callable[[tuple[int, ...]], Any]) -> None:
        """Set the values that a function reads from the device, which are 0 by default.

        `function` is the name of the reading function, such as "counts_on_host"; `values` returns the values for the
        shape of the read tensor.
        """
        self._operators.answers[function] = values

    @contextmanager
    def record(self) -> Generator[DeviceLog]:
        """Record the body; yield the log, which is complete after the body."""
        self._operators.details.clear()
        self._extension.start()
        log = DeviceLog(start_bytes=self._extension.allocated_bytes())
        try:
            yield log
        finally:
            log.peak_bytes = self._extension.peak_bytes()
            log.entries += [self._entry(*raw) for raw in self._extension.stop()]

    def _entry(self, kind: int, stream: int, number: int, num_bytes: int) -> DeviceEntry:
        if kind in (0, len(KINDS) - 2):  # kernels or collectives, and host waits, have details
            return replace(self._operators.details[number], stream=stream)
        return DeviceEntry(KINDS[kind], stream, num_bytes=num_bytes, number=number)

    @contextmanager
    def ranks(self, *, rank: int, world_size: int) -> Generator[None]:
        """Make this process one rank of a job whose other ranks do not exist, during the body."""
        environment = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
        nodes = {"GROUP_RANK": rank, "GROUP_WORLD_SIZE": world_size}
        os.environ.update({key: str(value) for key, value in (environment | nodes).items()})
        dist.init_process_group(BACKEND, store=dist.HashStore(), rank=rank, world_size=world_size)
        try:
            yield
        finally:
            for key in environment | nodes:
                os.environ.pop(key, None)
            with suppress(Exception):
                dist.destroy_process_group()


def _compiled() -> Any:
    """Compile the C++ part, or load it from the cache."""
    text = f"{torch.__version__} {sys.version_info[:2]} {_SOURCE.read_text()}"
    name = f"d9d_fakegpu_{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    folder = Path(os.environ.get("TORCH_EXTENSIONS_DIR", "~/.cache/torch_extensions")).expanduser() / "d9d"
    library = folder / f"{name}.so"
    if library.exists():
        return _imported(name, library)
    from torch.utils import cpp_extension  # noqa: PLC0415 - slow, and not needed for a cached library

    folder.mkdir(parents=True, exist_ok=True)
    # Use a temporary folder: in a shared one, torch's lock would remain if the build is killed.
    with tempfile.TemporaryDirectory(dir=folder) as build:
        cpp_extension.load(
            name, [str(_SOURCE)], extra_cflags=["-O0", "-g0"], build_directory=build, is_python_module=False
        )
        (Path(build) / library.name).replace(library)
    return _imported(name, library)


def _imported(name: str, library: Path) -> Any:
    spec = importlib.util.spec_from_file_location(name, library)
    assert spec is not None, "the name of a library has a known suffix"
    assert spec.loader is not None, "a library has a loader"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _device_module() -> types.ModuleType:
    """Return the module `torch.fakegpu`: the functions that torch calls on a device module."""
    module: Any = types.ModuleType(f"torch.{NAME}")
    device = torch.device(NAME, 0)
    module.Stream = lambda *args, **kwargs: torch.Stream(device=device)
    module.Event = lambda *args, enable_timing=False, **kwargs: torch.Event(device, enable_timing=enable_timing)
    module.is_available = module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    module.set_device = module.manual_seed = module.manual_seed_all = lambda *_: None
    module.get_rng_state = lambda *_: torch.zeros(16, dtype=torch.uint8)
    module.set_rng_state = lambda *_: None
    module._lazy_init = lambda: None  # torch 2.11 skips waits for a device that it never initialized
    module.synchronize = lambda *_: torch.accelerator.synchronize()
    module.current_stream = lambda *_: torch.accelerator.current_stream()
    module.set_stream = torch.accelerator.set_stream
    module.get_device_capability = lambda *_: (9, 0)
    module.get_device_name = lambda *_: "accelerator that computes nothing"
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    module.memory_stats = lambda *_: {}
    module.empty_cache = lambda: None
    module.is_bf16_supported = lambda *_: True
    module.stream = lambda stream: stream or nullcontext()
    module.device = lambda _: nullcontext()
    return module
