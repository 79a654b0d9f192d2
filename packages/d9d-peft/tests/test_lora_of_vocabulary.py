"""LoRA of embeddings and of language-model heads."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from d9d_dist import UserError
from d9d_modules import LanguageModelHead, TokenEmbedding
from d9d_peft import FullTune, LoRA, Stack, inject, load_adapters, merge_, save_adapters
from d9d_state import identity_of, rename_all

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


@pytest.mark.parametrize("tied", [False, True])
def test_merging_keeps_the_output_and_unties(tied: bool) -> None:
    model = adapted(tied=tied)
    before = model(IDS)
    merge_(model)
    torch.testing.assert_close(model(IDS), before, rtol=1e-12, atol=1e-12)
    assert model.head.weight is not model.embedding.get_parameter("weight")


def test_embeddings_with_max_norm_are_skipped() -> None:
    model = nn.ModuleDict({"table": nn.Embedding(5, 4, max_norm=1.0), "mix": nn.Linear(4, 4)})
    inject(LoRA("table|mix"), model)
    assert [name for name, p in model.named_parameters() if p.requires_grad] == [
        "mix.adapter.lora_a",
        "mix.adapter.lora_b",
    ]


def test_gradients_of_rows_are_divided_by_their_lookups_as_those_of_the_table() -> None:
    torch.manual_seed(0)
    model: Any = nn.ModuleDict({"table": nn.Embedding(5, 4, padding_idx=4, scale_grad_by_freq=True)}).double()
    inject(LoRA("table", rank=2, alpha=3.0), model)
    adapter = model.table.adapter
    nn.init.normal_(adapter.lora_b)
    ids, gradient = torch.tensor([[0, 1, 2], [2, 0, 4], [2, 3, 0]]), torch.randn(3, 3, 4).double()
    model.table(ids).backward(gradient)
    expected = torch.zeros(5, 2).double()
    for row in range(4):  # not of the padding
        expected[row] = 3 / 2 * (gradient[ids == row].mean(0) @ adapter.lora_a.mT)
    torch.testing.assert_close(adapter.lora_b.grad, expected, rtol=1e-14, atol=1e-14)


class _Scaled(nn.Embedding):
    """Table whose rows are multiplied by a number, or by a tensor."""

    def __init__(self, embed_scale: float | Tensor) -> None:
        super().__init__(7, 4)
        self.embed_scale = embed_scale

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - as in torch
        return super().forward(input) * self.embed_scale


@pytest.mark.parametrize("scale", [3.0, torch.tensor(3.0)], ids=["number", "tensor"])
def test_the_update_of_a_scaled_embedding_is_scaled_as_its_rows(scale: float | Tensor) -> None:
    model = nn.ModuleDict({"table": _Scaled(scale)}).double()
    inject(LoRA("table", rank=2, alpha=6), model)
    nn.init.normal_(model.get_parameter("table.adapter.lora_b"))
    a, b = (model.get_parameter(f"table.adapter.lora_{x}") for x in "ab")
    expected = (model.get_parameter("table.weight") + 3 * b @ a)[IDS] * 3
    torch.testing.assert_close(model["table"](IDS), expected, rtol=1e-14, atol=1e-14)
    merge_(model)
    torch.testing.assert_close(model["table"](IDS), expected, rtol=1e-14, atol=1e-14)


def test_tables_that_are_looked_up_in_another_way_are_skipped() -> None:
    class Positions(nn.Embedding):
        def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - as in torch
            return super().forward(input.cumsum(-1) + 1)

    model = nn.ModuleDict({"table": Positions(9, 4), "mix": nn.Linear(4, 4)})
    inject(LoRA("table|mix"), model)
    assert {name for name, p in model.named_parameters() if p.requires_grad} == {
        "mix.adapter.lora_a",
        "mix.adapter.lora_b",
    }


def qwen(*, tied: bool = False) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=17, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=4, tie_word_embeddings=tied,
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


def _draw(model: Any) -> None:
    torch.manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter)


@pytest.mark.parametrize("mapped", [False, True])
def test_a_tuned_embedding_of_a_tied_model_is_exchanged_with_peft(mapped: bool, tmp_path: Path) -> None:
    """peft unties the embedding, so the files hold the tensor under both names."""
    import peft

    ours = qwen(tied=True)
    base = identity_of(ours) if mapped else None  # names the tied tensor once
    inject(Stack(LoRA("q_proj", rank=4, alpha=6), FullTune("embed_tokens")), ours)
    _draw(ours)
    save_adapters(ours, tmp_path, base)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["modules_to_save"] == ["model.embed_tokens", "lm_head"]
    theirs = peft.PeftModel.from_pretrained(qwen(tied=True), str(tmp_path))
    torch.testing.assert_close(theirs(IDS).logits, ours(IDS).logits, rtol=1e-10, atol=1e-10)
    again = qwen(tied=True)
    inject(Stack(LoRA("q_proj", rank=4, alpha=6), FullTune("embed_tokens")), again)
    load_adapters(again, tmp_path, base)
    torch.testing.assert_close(again(IDS).logits, ours(IDS).logits, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        (["embed_tokens"], r"in the model, but not in the folder: base_model\.model\.lm_head\.weight"),
        (
            ["embed_tokens", "lm_head"],
            r"different values of .*embed_tokens\.weight and .*lm_head\.weight, which",
        ),
    ],
)
def test_a_tied_model_does_not_load_untied_embeddings(modules: list[str], message: str, tmp_path: Path) -> None:
    import peft

    config = peft.LoraConfig(r=4, lora_alpha=6, target_modules=["q_proj"], modules_to_save=modules)
    theirs = peft.get_peft_model(qwen(tied=True), config)
    _draw(theirs)
    theirs.save_pretrained(str(tmp_path))
    ours = qwen(tied=True)
    inject(Stack(LoRA("q_proj", rank=4, alpha=6), FullTune("embed_tokens")), ours)
    with pytest.raises(UserError, match=message):
        load_adapters(ours, tmp_path)


@pytest.mark.parametrize("mapped", [False, True])
def test_an_adapter_of_a_tied_head_is_exchanged_with_peft_and_merged(mapped: bool, tmp_path: Path) -> None:
    import peft

    ours: Any = qwen(tied=True)
    base = identity_of(ours) if mapped else None
    inject(LoRA("lm_head|q_proj", rank=4, alpha=6), ours)
    _draw(ours)
    save_adapters(ours, tmp_path / "ours", base)
    theirs = peft.PeftModel.from_pretrained(qwen(tied=True), str(tmp_path / "ours"))
    expected = ours(IDS).logits
    torch.testing.assert_close(theirs(IDS).logits, expected, rtol=1e-10, atol=1e-10)
    again = qwen(tied=True)
    inject(LoRA("lm_head|q_proj", rank=4, alpha=6), again)
    load_adapters(again, tmp_path / "ours", base)
    merge_(again)
    torch.testing.assert_close(again(IDS).logits, expected, rtol=1e-10, atol=1e-10)
    assert not again.config.tie_word_embeddings


def test_the_name_of_a_tied_tensor_in_another_checkpoint_must_be_known(tmp_path: Path) -> None:
    model = Ends(tied=True)
    base = rename_all({"wte": "embedding.weight", "mix.weight": "mix.weight", "mix.bias": "mix.bias"})
    inject(LoRA("head"), model)
    with pytest.raises(UserError, match=r"head\.weight is tied to embedding\.weight, which is wte in the base"):
        save_adapters(model, tmp_path, base)


def test_a_layer_with_two_names_is_not_stored(tmp_path: Path) -> None:
    """peft adapts such a layer under its first name only, which is another model."""
    model = nn.ModuleDict({"a": nn.Linear(4, 4)})
    model["b"] = model["a"]
    inject(LoRA("a"), model)
    with pytest.raises(UserError, match=r"got adapters of layers with several names: a and b; expected one name"):
        save_adapters(model, tmp_path)


def test_the_advised_alpha_is_accepted(tmp_path: Path) -> None:
    first = qwen()
    inject(LoRA("q_proj", rank=3, alpha=7.123456789, rank_stabilized=True), first)
    save_adapters(first, tmp_path)
    model = qwen()
    inject(LoRA("q_proj", rank=3, alpha=1.0), model)
    with pytest.raises(UserError, match=r"Inject it with rank_stabilized = True and rank = 3 and alpha = ") as raised:
        load_adapters(model, tmp_path)
    advised = float(str(raised.value).rpartition("alpha = ")[2].rstrip("."))
    again = qwen()
    inject(LoRA("q_proj", rank=3, alpha=advised, rank_stabilized=True), again)
    load_adapters(again, tmp_path)
