"""What the fork server imports once for all ranks: forking costs milliseconds, importing seconds."""

import torch
import torch._dynamo  # what optimizers import at their first step
import torch.distributed
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor  # noqa: F401  (imported for its effect on the forked ranks)
