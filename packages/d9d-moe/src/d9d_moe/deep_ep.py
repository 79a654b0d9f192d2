"""DeepEP, whose kernels send tokens over NVLink and RDMA: why it cannot dispatch here, in words."""

from importlib.util import find_spec
from typing import NoReturn

import torch

from d9d_dist.errors import UserError

DEEP_EP_INSTALL = "pip install --no-build-isolation git+https://github.com/deepseek-ai/DeepEP"


def refuse_deep_ep(device: torch.device) -> NoReturn:
    """Say what DeepEP lacks.

    Args:
        device: Where tokens are.

    Raises:
        UserError: Always. If the device is no CPU and the package is not installed, with the install command.
    """
    if device.type == "cpu":
        raise UserError(
            "dispatch = 'deep_ep' on a CPU; expected an accelerator with NVLink or RDMA. Use dispatch = 'all_to_all'."
        )
    own = "and pass a function that makes your own Dispatcher of it; this package has none yet"
    if find_spec("deep_ep") is None:
        raise UserError(
            f"dispatch = 'deep_ep', but the package deep_ep is not installed. Install it: {DEEP_EP_INSTALL}, {own}. Or "
            "use dispatch = 'all_to_all'."
        )
    raise UserError(f"dispatch = 'deep_ep', which is installed; use dispatch = 'all_to_all', or keep it {own}.")
