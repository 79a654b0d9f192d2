"""Context managers for code that must not affect the training: event handlers, evaluations, replays."""

from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch import nn

from d9d_dist.values import seeds


@contextmanager
def evaluation_mode(model: nn.Module) -> Generator[None]:
    """Switch to evaluation mode without gradients; restore modes of modules, buffers and random states on exit.

    Generators in attributes of modules have their states again, too; other attributes keep their values. A module that
    overrides `train` gets the call of its mode, as by `model.train()`.
    """
    from d9d_dist.values.buffer_values import BufferValues  # noqa: PLC0415 - imports DTensor, which event handlers do not need

    modes = [(module, module.training) for module in model.modules()]
    buffers = BufferValues(model)
    resets = [reset for module, _ in modes for each in vars(module).values() if (reset := seeds.reset_of(each))]
    model.eval()
    try:
        with torch.no_grad(), restored_random(device=True):
            yield
    finally:
        buffers.restore()
        for reset in resets:
            reset()
        for module, mode in modes:  # outer modules first: an own `train` also sets the modes of inner ones
            if module.training is not mode:
                if type(module).train is nn.Module.train:
                    module.training = mode
                else:
                    module.train(mode)


@contextmanager
def isolated_random(*parts: str | int, device: bool = False) -> Generator[None]:
    """Seed the generators of Python, NumPy (if imported) and torch for the body; restore their states afterwards.

    Args:
        parts: Key of the random stream; equal parts give equal draws, on every rank and in every run.
        device: If True, also seed and restore the accelerator's generator.
    """
    with restored_random(device=device):
        seed_generators(*parts, device=device)
        yield


def seed_generators(*parts: str | int, device: bool = False) -> None:
    """Seed the generators as `isolated_random` does, without restoring their states."""
    seeds.seed_generators(seeds.stream_key(*parts), device=False)
    if device and torch.accelerator.is_available():  # only the current device, whose state is restored
        torch.get_device_module().manual_seed(seeds.stream_key(*parts))


@contextmanager
def restored_random(*, device: bool = False) -> Generator[None]:
    """Restore the generators of Python, NumPy (if imported) and torch on exit; with `device` also the accelerator's."""
    has_accelerator = device and torch.accelerator.is_available()
    device_state = torch.get_device_module().get_rng_state() if has_accelerator else None
    host, torch_state = seeds.HostRandom.now(), torch.default_generator.get_state()
    try:
        yield
    finally:
        host.restore()
        torch.default_generator.set_state(torch_state)
        if has_accelerator:
            torch.get_device_module().set_rng_state(device_state)
