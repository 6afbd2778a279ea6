"""Models of other people, unchanged: Hugging Face, timm-style, multi-input, and outputs of every form."""

import pytest
import torch
from torch import nn

from etude import LanguageModelingLoss, Trainer
from etude.losses import ClassificationLoss


def train(model, loader, **kwargs):
    config = {"epochs": 4, "log_interval": 2, **kwargs.pop("config", {})}
    trainer = Trainer(model, loader, loader, config=config, device="cpu", progress=False, **kwargs)
    before = trainer.evaluate()["loss"]
    after = trainer.train()["val_loss"]
    return before, after, trainer


def token_batches(vocabulary=40, count=4):
    for i in range(count):
        ids = (torch.arange(10) + torch.arange(8)[:, None] + i) % vocabulary
        yield {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_hugging_face_causal_model(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=40, n_positions=16, n_embd=32, n_layer=2, n_head=2)
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config)
    before, after, trainer = train(
        model, list(token_batches()), config={"learning_rate": 5e-3}, output_dir=tmp_path / "run"
    )
    assert after < 0.7 * before
    # the loss is the one the model itself would report
    batch = next(iter(token_batches()))
    model.eval()
    own = model(**batch).loss.item()
    assert trainer.evaluate([batch])["loss"] == pytest.approx(own, rel=1e-5)
    # tied weights survive the checkpoint
    fresh = transformers.GPT2LMHeadModel(config)
    other = Trainer(fresh, progress=False, device="cpu")
    other.load_checkpoint(tmp_path / "run")
    assert fresh.lm_head.weight is fresh.transformer.wte.weight
    assert other.evaluate([batch])["loss"] == pytest.approx(own, rel=1e-6)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_hugging_face_classifier():
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=40,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        num_labels=3,
    )
    torch.manual_seed(0)
    batches = [
        {
            "input_ids": (ids := torch.randint(40, (8, 6))),
            "attention_mask": torch.ones(8, 6).long(),
            "labels": ids[:, 0] % 3,
        }
        for _ in range(6)
    ]
    before, after, _ = train(
        transformers.BertForSequenceClassification(config), batches, config={"learning_rate": 5e-3, "epochs": 8}
    )
    assert after < 0.8 * before


class TimmStyle(nn.Module):
    """A vision model as timm writes them: `forward_features`, `forward_head`, logits out."""

    def __init__(self, num_classes=4, drop_rate=0.1):
        super().__init__()
        self.num_classes = num_classes
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.SiLU())
        self.head_drop = nn.Dropout(drop_rate)
        self.head = nn.Linear(8, num_classes)

    def forward_features(self, x):
        return self.stem(x)

    def forward_head(self, x):
        return self.head(self.head_drop(x.mean((2, 3))))

    def forward(self, x):
        return self.forward_head(self.forward_features(x))


def test_timm_style_model():
    torch.manual_seed(0)
    images = torch.randn(64, 3, 16, 16)
    labels = images.mean((2, 3)).argmax(1)
    before, after, _ = train(
        TimmStyle(), (images, labels), config={"batch_size": 16, "learning_rate": 0.02, "epochs": 10}
    )
    assert after < 0.9 * before


@pytest.mark.parametrize("form", ["tensor", "tuple", "tuple_with_loss", "dict", "object"])
def test_every_form_of_output(form):
    class Output:
        def __init__(self, logits):
            self.logits = logits

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(5, 3)

        def forward(self, x):
            logits = self.layer(x)
            return {
                "tensor": logits,
                "tuple": (logits,),
                "tuple_with_loss": (logits, logits.sum(), None),
                "dict": {"logits": logits, "hidden": x},
                "object": Output(logits),
            }[form]

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(32, 5, generator=generator)
    before, after, _ = train(
        Model(), (x, x[:, :3].argmax(1)), loss=ClassificationLoss(), config={"learning_rate": 0.1, "batch_size": 8}
    )
    assert after < 0.7 * before


class TypedTokens(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.types = nn.Embedding(20, 16), nn.Embedding(2, 16)
        self.head = nn.Linear(16, 20)
        self.shapes = set()

    def forward(self, tokens, types, attn_mask):
        self.shapes.add((tuple(tokens.shape), tuple(types.shape), tuple(attn_mask.shape)))
        return self.head(self.tokens(tokens) + self.types(types))


@pytest.mark.parametrize("form", ["tokens", "tensor", "one_tuple", "input_ids"])
def test_every_form_of_token_batch(form):
    tokens = (torch.arange(9) + torch.arange(8)[:, None]) % 20
    types, mask = torch.zeros_like(tokens), torch.ones_like(tokens)
    if form == "tokens":
        model, batch = TypedTokens(), {"tokens": tokens, "types": types, "attn_mask": mask}
    else:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(20, 16), nn.Linear(16, 20))
        batch = {"tensor": tokens, "one_tuple": (tokens,), "input_ids": {"input_ids": tokens}}[form]
    before, after, _ = train(model, [batch] * 4, loss=LanguageModelingLoss(), config={"learning_rate": 0.1})
    assert after < 0.3 * before  # the next token follows from the last one
    if form == "tokens":
        assert model.shapes == {((8, 8), (8, 8), (8, 8))}
