"""Models of Hugging Face, unchanged: our loss equals the one the model computes itself from the same batch."""

import pytest
import torch

from etude.losses import LanguageModelingLoss, SupervisedTask, TextClassificationLoss, mean_of

transformers = pytest.importorskip("transformers")

V, B, L = 37, 4, 9
TINY = {"vocab_size": V, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, V, (B, L), generator=generator)
    mask = (torch.arange(L) < torch.tensor([9, 5, 2, 7])[:, None]).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def check(model, batch, task):
    torch.manual_seed(0)
    model.eval()
    expected = model(**batch).loss
    term = task(model, batch, metrics=True)["loss"]
    torch.testing.assert_close(mean_of(term), expected)
    parameters = [p for p in model.parameters() if p.requires_grad]
    ours = torch.autograd.grad(mean_of(term), parameters, allow_unused=True)
    theirs = torch.autograd.grad(expected, parameters, allow_unused=True)
    for one, other in zip(ours, theirs, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other)


def gpt2():
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=V, n_positions=16, n_embd=16, n_layer=1, n_head=2)
    )


@pytest.mark.parametrize("loss", [None, LanguageModelingLoss()])
def test_gpt2(batch, loss):
    task = SupervisedTask(loss)
    check(gpt2(), batch, task)
    if loss is None:
        assert isinstance(task.strategy.chosen, LanguageModelingLoss)
        assert task.strategy.chosen.shift


def test_gpt2_without_labels_learns_its_inputs_up_to_the_padding(batch):
    model = gpt2().eval()
    with_labels = SupervisedTask(LanguageModelingLoss())(model, batch, metrics=False)["loss"]
    del batch["labels"]
    without = SupervisedTask(LanguageModelingLoss())(model, batch, metrics=False)["loss"]
    torch.testing.assert_close(without.sum, with_labels.sum)
    assert int(without.count) == int(with_labels.count)


@pytest.mark.parametrize("loss", [None, TextClassificationLoss()])
def test_bert_for_sequence_classification(batch, loss):
    model = transformers.BertForSequenceClassification(transformers.BertConfig(**TINY, num_labels=3))
    check(model, {**batch, "labels": torch.tensor([0, 2, 1, 1])}, SupervisedTask(loss))


def test_bert_for_masked_lm_is_not_shifted(batch):
    model = transformers.BertForMaskedLM(transformers.BertConfig(**TINY))
    labels = (
        batch["input_ids"].masked_fill(torch.arange(L) % 2 == 1, -100).masked_fill(batch["attention_mask"] == 0, -100)
    )
    masked = batch["input_ids"].masked_fill(labels != -100, 1)
    task = SupervisedTask()
    check(model, {**batch, "input_ids": masked, "labels": labels}, task)
    assert not task.strategy.chosen.shift


def test_t5_makes_its_decoder_inputs_from_the_labels(batch):
    config = transformers.T5Config(
        vocab_size=V, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    labels = torch.randint(3, V, (B, L), generator=torch.Generator().manual_seed(1))
    check(transformers.T5ForConditionalGeneration(config), {**batch, "labels": labels}, SupervisedTask())


def test_vit():
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, image_size=8, patch_size=4
    )
    config.num_labels = 3
    batch = {"pixel_values": torch.randn(B, 3, 8, 8), "labels": torch.tensor([0, 2, 1, 1])}
    check(transformers.ViTForImageClassification(config), batch, SupervisedTask())
