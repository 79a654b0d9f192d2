"""Modules that the fork server imports once for all ranks: a fork takes milliseconds, the imports take seconds."""

import torch
import torch._dynamo  # imported by optimizers in their first step
import torch.distributed
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor  # noqa: F401  (imported for its effect on the forked ranks)
