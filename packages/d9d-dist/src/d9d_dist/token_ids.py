"""Validation of token ids; ids out of range could otherwise give wrong results silently."""

import torch
from torch import Tensor

from d9d_dist.errors import UserError


def check_token_ids(ids: Tensor, vocab_size: int, *, what: str, ignored: int | None = None) -> None:
    """Raise `UserError` if an id is neither in `range(vocab_size)` nor `ignored`. `ids` are integers of any shape.

    On an accelerator the check is asynchronous: no host-device synchronization; a later operation that synchronizes
    raises the failure. `what` names the ids in the message. Also raises `UserError` for ids that are not integers.
    """
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise UserError(f"got {what} of {ids.dtype}; expected integers. Convert them: ids.long().")
    if ids.is_meta or not ids.numel():
        return
    is_known = (ids >= 0) & (ids < vocab_size)
    if ignored is not None:
        is_known |= ids == ignored
    besides = "" if ignored is None else f" or {ignored}"
    expected = f"expected {what} within 0 ... {vocab_size - 1}{besides}"
    if ids.device.type == "cpu" and not torch.compiler.is_compiling() and type(ids) is Tensor:
        if not is_known.all():
            unknown = ids[~is_known]
            raise UserError(f"got {what} from {unknown.min().item()} to {unknown.max().item()}; {expected}.")
    else:
        torch._assert_async(is_known.all(), f"{expected}.")
