import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from d9d_modules import AttentionOptions, AttentionRequest
from d9d_modules.attention_backends.flex import FlexBackend, _block_mask_of_batch, block_mask

CPU = torch.device("cpu")


def _request(device: str, dtype: torch.dtype, *, head_dim: int = 64, needs_gradient: bool = True) -> AttentionRequest:
    return AttentionRequest(
        options=AttentionOptions(window=9, softcap=2.0),
        has_sinks=True,
        has_documents=True,
        needs_gradient=needs_gradient,
        dtype=dtype,
        device=torch.device(device),
        head_dim=head_dim,
    )


def test_rejection_names_the_unsupported_feature() -> None:
    flex = FlexBackend()
    assert flex.rejection(_request("cpu", torch.float32)) == "has no backward on cpu"
    assert flex.rejection(_request("cpu", torch.float64, needs_gradient=False)) is None
    assert flex.rejection(_request("cuda", torch.bfloat16)) is None
    assert flex.rejection(_request("cuda", torch.float64)) == "does not support torch.float64 on cuda"
    assert flex.rejection(_request("cuda", torch.float32, head_dim=8)) == "needs a head dim of at least 16, not 8"
    assert flex.is_fast(_request("cuda", torch.bfloat16))
    assert not flex.is_fast(_request("cpu", torch.float32, needs_gradient=False))


@pytest.mark.parametrize("window", [None, 100, 130])
@pytest.mark.parametrize(("length", "key_length"), [(300, 300), (512, 512), (200, 500), (1, 129)])
@pytest.mark.parametrize("documents", [None, "packed", "scattered"])
@pytest.mark.parametrize(("is_causal", "has_mask"), [(True, False), (False, False), (False, True)])
def test_the_block_mask_equals_the_block_mask_of_torch(
    *, length: int, key_length: int, window: int | None, documents: str | None, is_causal: bool, has_mask: bool
) -> None:
    ids = None if documents is None else torch.randint(0, 60, (2, key_length))
    if ids is not None and documents == "packed":
        ids = (ids == 0).cumsum(dim=1)
    mask = torch.rand(2, length, key_length) < 0.5
    mask[0, :128], mask[1, :, 128:] = True, False
    ours = block_mask(
        length,
        key_length,
        is_causal=is_causal,
        window=window,
        documents_BS=ids,
        mask_BLS=mask if has_mask else None,
        device=CPU,
    )
    batch = 2 if has_mask or ids is not None else None
    theirs = create_block_mask(ours.mask_mod, batch, None, length, key_length, device="cpu")
    assert ours.shape[-2:] == theirs.shape[-2:] == (length, key_length)
    missing = theirs.to_dense() & ~ours.to_dense().bool()
    assert not missing.any()
    # Each condition is checked by block on its own, so several of them may leave more blocks than necessary.
    if not has_mask and documents != "scattered" and (is_causal or window is None or documents is None):
        assert torch.equal(ours.to_dense(), theirs.to_dense())
        assert torch.equal(ours.kv_num_blocks, theirs.kv_num_blocks)


def test_full_blocks_skip_the_mask_function() -> None:
    mask = block_mask(512, 512, window=None, documents_BS=torch.zeros(1, 512, dtype=torch.int64), device=CPU)
    assert mask.kv_num_blocks.tolist() == [[[1, 1, 1, 1]]]
    assert mask.full_kv_num_blocks is not None
    assert mask.full_kv_num_blocks.tolist() == [[[0, 1, 2, 3]]]


def test_layers_share_the_mask_of_a_batch_until_its_documents_change() -> None:
    documents = torch.zeros(1, 256, dtype=torch.int64)
    settings = {"is_causal": True, "documents_BS": documents, "mask_BLS": None, "device": CPU}

    def mask(window: int | None = None, **changes: torch.Tensor) -> BlockMask:
        return _block_mask_of_batch(256, 256, window=window, **(settings | changes))

    first, windowed = mask(), mask(window=100)
    assert mask() is first
    assert mask(window=100) is windowed is not first
    assert mask(documents_BS=documents.clone()) is not first
    documents[:, 128:] = 1
    assert mask().to_dense().sum() < first.to_dense().sum()
    with torch.inference_mode():
        at_inference = documents.clone()
        assert mask(documents_BS=at_inference) is not mask(documents_BS=at_inference)
