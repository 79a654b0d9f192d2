"""LoRA of embeddings and of language-model heads."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from d9d_dist import UserError
from d9d_modules import LanguageModelHead, TokenEmbedding
from d9d_peft import LoRA, inject, load_adapters, merge_, save_adapters

IDS = torch.tensor([[3, 0, 5], [1, 5, 6]])


class Ends(nn.Module):
    """Embedding and head, with a layer between them; optionally tied."""

    def __init__(self, *, tied: bool = False, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = TokenEmbedding(7, 4, init_std=1.0)
        self.mix = nn.Linear(4, 4)
        self.head = LanguageModelHead(4, 7, softcap=5.0, init_std=1.0)
        if tied:
            self.head.weight = self.embedding.get_parameter("weight")
        self.to(dtype)

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        return self.head(self.mix(self.embedding(ids)).tanh(), labels=labels)


def adapted(**options: Any) -> Ends:
    model = Ends(**options)
    inject(LoRA("embedding|head", rank=2, alpha=6), model)
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "adapter" in name:
            nn.init.normal_(parameter)
    return model


def reference(model: Ends) -> tuple[Tensor, Tensor]:
    """Return the logits and the summed loss of the model with its dense weights W + s B A."""
    table, weight = (
        model.get_parameter(f"{name}.weight")
        + 3 * model.get_parameter(f"{name}.adapter.lora_b") @ model.get_parameter(f"{name}.adapter.lora_a")
        for name in ("embedding", "head")
    )
    logits = 5 * torch.tanh(model.mix(table[IDS]).tanh() @ weight.T / 5)
    return logits, F.cross_entropy(logits.flatten(0, 1), IDS.roll(-1).flatten(), reduction="sum")


@pytest.mark.parametrize("tied", [False, True])
def test_logits_losses_and_gradients_equal_the_merged_dense_weights(tied: bool) -> None:
    model = adapted(tied=tied)
    logits, loss = reference(model)
    torch.testing.assert_close(model(IDS), logits, rtol=1e-12, atol=1e-12)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert trained.keys() == {f"{name}.adapter.lora_{x}" for name in ("embedding", "head") for x in "ab"}
    expected = torch.autograd.grad(loss, list(trained.values()))
    losses = model(IDS, labels=IDS.roll(-1))
    torch.testing.assert_close(losses.sum(), loss, rtol=1e-12, atol=1e-12)
    losses.sum().backward()
    got = [parameter.grad for parameter in trained.values()]
    torch.testing.assert_close(got, list(expected), rtol=1e-11, atol=1e-12)
    assert isinstance(model.head.weight, nn.Parameter)  # the head has its own weight again


def test_initial_adapters_have_no_effect() -> None:
    model = Ends()
    before = model(IDS)
    inject(LoRA("embedding|head"), model)
    torch.testing.assert_close(model(IDS), before, rtol=1e-14, atol=1e-14)


def test_a_bfloat16_model_keeps_its_dtype() -> None:
    model = adapted(dtype=torch.bfloat16)
    assert model.get_parameter("head.adapter.lora_a").dtype == torch.float32
    assert model(IDS).dtype == torch.bfloat16
    model(IDS, labels=IDS).sum().backward()
    gradient = model.get_parameter("embedding.adapter.lora_b").grad
    assert gradient is not None
    assert gradient.dtype == torch.float32


def test_merging_into_untied_weights_keeps_the_output_and_tied_weights_are_refused() -> None:
    model = adapted()
    before = model(IDS)
    merge_(model)
    torch.testing.assert_close(model(IDS), before, rtol=1e-12, atol=1e-12)
    with pytest.raises(UserError, match=r"embedding\.weight is tied to a parameter of another module"):
        merge_(adapted(tied=True))


def test_embeddings_with_max_norm_are_skipped() -> None:
    model = nn.ModuleDict({"table": nn.Embedding(5, 4, max_norm=1.0), "mix": nn.Linear(4, 4)})
    inject(LoRA("table|mix"), model)
    assert [name for name, p in model.named_parameters() if p.requires_grad] == [
        "mix.adapter.lora_a",
        "mix.adapter.lora_b",
    ]


def qwen() -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=17, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=4, tie_word_embeddings=False,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).double()


def test_files_are_exchanged_with_peft(tmp_path: Path) -> None:
    import peft

    config = peft.LoraConfig(r=4, lora_alpha=6, target_modules=["embed_tokens", "lm_head", "q_proj"])
    theirs = peft.get_peft_model(qwen(), config)
    torch.manual_seed(1)
    for parameter in theirs.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter)
    theirs.save_pretrained(str(tmp_path / "theirs"), save_embedding_layers=False)
    expected = theirs(IDS).logits

    ours = qwen()
    inject(LoRA("embed_tokens|lm_head|q_proj", rank=4, alpha=6), ours)
    load_adapters(ours, tmp_path / "theirs")
    torch.testing.assert_close(ours(IDS).logits, expected, rtol=1e-10, atol=1e-10)
    save_adapters(ours, tmp_path / "ours")
    back = peft.PeftModel.from_pretrained(qwen(), str(tmp_path / "ours"))
    torch.testing.assert_close(back(IDS).logits, expected, rtol=1e-10, atol=1e-10)
