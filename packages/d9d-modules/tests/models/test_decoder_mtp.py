import pytest
import torch
from torch.nn import functional as F

from d9d_dist import UserError
from d9d_modules import QWEN_MTP, DecoderWithMtp, Qwen3Params, decoder_from_hugging_face, mtp_targets
from d9d_modules.models.decoder_mtp import DEEPSEEK_MTP, MtpLayer, mtp_from_hugging_face
from d9d_state import parallel

PARAMS = Qwen3Params(
    vocab_size=16,
    hidden_size=12,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    intermediate_size=20,
    tie_word_embeddings=False,
    initializer_range=0.3,
)


def test_mtp_targets_do_not_cross_documents() -> None:
    ids, labels = torch.tensor([[1, 2, 3, 4, 5]]), torch.tensor([[2, 3, -100, 5, 6]])
    ids_BLK, labels_BLK = mtp_targets(ids, labels, torch.tensor([[0, 0, 0, 1, 1]]), num_mtp_layers=2)
    assert ids_BLK[0].T.tolist() == [[2, 3, 0, 5, 0], [3, 0, 0, 0, 0]]
    assert labels_BLK[0].T.tolist() == [[3, -100, -100, 6, -100], [-100] * 5]
    assert mtp_targets(ids, labels)[1][0, :, 0].tolist() == [3, -100, 5, 6, -100]


def test_the_inputs_of_mtp_targets_are_not_broadcast() -> None:
    ids = torch.zeros(2, 5, dtype=torch.int64)
    with pytest.raises(UserError, match=r"got document_ids_BL of shape \(1, 5\)"):
        mtp_targets(ids, ids, ids[:1])
    with pytest.raises(
        UserError, match=r"got input_ids_BL of shape \(2, 5\) and labels_BL of shape \(1, 5\); expected"
    ):
        mtp_targets(ids, ids[:1])


def test_the_loss_of_a_dense_model_equals_the_equations() -> None:
    """Equations 21 to 25 of arXiv:2412.19437, without the layer's own forward."""
    model = DecoderWithMtp(PARAMS, mtp_loss_weight=0.5).double()
    ids, labels = torch.randint(0, 16, (2, 2, 7))
    mtp_ids_BLK, mtp_labels_BLK = mtp_targets(ids, labels)
    losses = model(ids, labels=labels, mtp_ids_BLK=mtp_ids_BLK, mtp_labels_BLK=mtp_labels_BLK)
    (layer,) = model.mtp
    assert isinstance(layer, MtpLayer)
    assert model.lm_head is not None
    assert model.backbone.embedding is not None
    hidden = model.backbone(ids)
    embedded = model.backbone.embedding(mtp_ids_BLK[..., 0])
    both = torch.cat([layer.embedding_norm(embedded), layer.hidden_norm(hidden)], dim=-1)
    rotary = model.backbone.rotary_tables(torch.arange(7)[None], PARAMS.rope(2))
    block = layer.block(
        both @ layer.projection.weight.T, rotary, document_ids_BL=None, mask_BL=None, attention_mask=None
    )
    expected = [
        F.cross_entropy(model.lm_head(x).transpose(1, 2), each, reduction="none")
        for x, each in ((hidden, labels), (layer.norm(block), mtp_labels_BLK[..., 0]))
    ]
    torch.testing.assert_close(losses, expected[0] + 0.5 * expected[1], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("names", [DEEPSEEK_MTP, QWEN_MTP])
def test_the_mapper_reads_every_tensor_of_the_model(names: dict[str, str]) -> None:
    model = DecoderWithMtp(PARAMS)
    mapper = parallel(decoder_from_hugging_face(PARAMS), mtp_from_hugging_face(PARAMS, names))
    assert set(mapper.outputs) == model.state_dict().keys() - {"mtp_embedding.weight"}
    prefix = names["projection."].format(index=PARAMS.num_layers, depth=0)
    assert f"{prefix}weight" in mapper.inputs
