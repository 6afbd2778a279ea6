"""Heads of Hugging Face, unchanged and without a loss given: what is trained is the loss that the model computes."""

import pytest
import torch

from etude.core.errors import TrainingError
from etude.losses import SupervisedTask, mean_of
from etude.losses.inferred import WORDS
from etude.losses.own import MAX_ATTEMPTS, ModelLoss

transformers = pytest.importorskip("transformers")

V, B, L = 37, 4, 9
TINY = {"vocab_size": V, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
VISION = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "image_size": 8,
    "patch_size": 4,
}
IMAGES = {"pixel_values": torch.randn(B, 3, 8, 8, generator=torch.Generator().manual_seed(2))}
CLASSES = {"labels": torch.tensor([0, 2, 1, 1])}
IDS = torch.randint(3, V, (B, L), generator=torch.Generator().manual_seed(0))
MASK = (torch.arange(L) < torch.tensor([9, 5, 3, 7])[:, None]).long()
TEXT = {"input_ids": IDS, "attention_mask": MASK}
NEXT = {**TEXT, "labels": IDS.masked_fill(MASK == 0, -100)}
TARGETS = torch.randint(3, V, (B, L), generator=torch.Generator().manual_seed(1)).masked_fill(MASK == 0, -100)


def bert(head, **settings):
    return getattr(transformers, f"BertFor{head}")(transformers.BertConfig(**TINY, **settings))


def masked_lm():
    labels = IDS.masked_fill((torch.arange(L) % 3 != 1) | (MASK == 0), -100)
    return bert("MaskedLM"), {**TEXT, "input_ids": IDS.masked_fill(labels != -100, 1), "labels": labels}


def masked_lm_whose_labels_equal_its_inputs():
    """Some masked tokens are kept as they are; in a tiny batch that may be all of them."""
    return bert("MaskedLM"), {**TEXT, "labels": IDS.masked_fill((torch.arange(L) % 3 != 1) | (MASK == 0), -100)}


def gpt2(labels=NEXT["labels"]):
    config = transformers.GPT2Config(vocab_size=V, n_positions=16, n_embd=16, n_layer=1, n_head=2)
    return transformers.GPT2LMHeadModel(config), {**TEXT, "labels": labels}


def llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY, num_key_value_heads=2)), NEXT


def mixtral(router_loss):
    settings = {"num_local_experts": 4, "output_router_logits": router_loss, "router_aux_loss_coef": 0.1}
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**TINY, num_key_value_heads=2, **settings)
    ), NEXT


def t5():
    sizes = {"vocab_size": V, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    config = transformers.T5Config(**sizes, decoder_start_token_id=0)
    return transformers.T5ForConditionalGeneration(config), {**TEXT, "labels": TARGETS}


def bart():
    layers = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    sizes = {"vocab_size": V, "d_model": 16, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, **layers}
    config = transformers.BartConfig(**sizes, max_position_embeddings=16, pad_token_id=1, decoder_start_token_id=2)
    return transformers.BartForConditionalGeneration(config), {**TEXT, "labels": TARGETS}


def whisper():
    layers = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    sizes = {"vocab_size": V, "d_model": 16, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "num_mel_bins": 8}
    special = {"pad_token_id": 1, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}
    lengths = {"max_source_positions": 10, "max_target_positions": 16}
    config = transformers.WhisperConfig(**sizes, **layers, **special, **lengths)
    features = torch.randn(B, 8, 20, generator=torch.Generator().manual_seed(3))
    return transformers.WhisperForConditionalGeneration(config), {"input_features": features, "labels": TARGETS}


def ctc(reduction):
    sizes = {"conv_dim": (8, 8), "conv_kernel": (4, 4), "conv_stride": (2, 2), "num_feat_extract_layers": 2}
    convs = {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "feat_extract_norm": "layer"}
    config = transformers.Wav2Vec2Config(**{**TINY, **sizes, **convs}, ctc_loss_reduction=reduction)
    sound = torch.randn(B, 200, generator=torch.Generator().manual_seed(3))
    return transformers.Wav2Vec2ForCTC(config), {"input_values": sound, "labels": TARGETS}


def vit():
    return transformers.ViTForImageClassification(transformers.ViTConfig(**VISION, num_labels=3)), IMAGES | CLASSES


def mae():
    decoder = {"decoder_hidden_size": 16, "decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 2}
    config = transformers.ViTMAEConfig(**VISION, **decoder, decoder_intermediate_size=16)
    noise = torch.rand(B, 4, generator=torch.Generator().manual_seed(3))
    return transformers.ViTMAEForPreTraining(config), {**IMAGES, "noise": noise}


def video_mae():
    decoder = {"decoder_hidden_size": 16, "decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 2}
    config = transformers.VideoMAEConfig(**VISION, **decoder, decoder_intermediate_size=16, num_frames=2)
    video = torch.randn(B, 2, 3, 8, 8, generator=torch.Generator().manual_seed(3))
    return transformers.VideoMAEForPreTraining(config), {
        "pixel_values": video,
        "bool_masked_pos": torch.tensor([[True, False, True, False]] * B),
    }


def segformer():
    sizes = {"num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [1, 1], "hidden_sizes": [8, 16]}
    others = {"num_attention_heads": [1, 2], "patch_sizes": [3, 3], "strides": [2, 2], "mlp_ratios": [2, 2]}
    config = transformers.SegformerConfig(**sizes, **others, decoder_hidden_size=16, num_labels=3)
    labels = torch.randint(0, 3, (B, 16, 16), generator=torch.Generator().manual_seed(3))
    labels[0, :12] = 255  # config.semantic_loss_ignore_index
    pixels = torch.randn(B, 3, 16, 16, generator=torch.Generator().manual_seed(4))
    return transformers.SegformerForSemanticSegmentation(config), {"pixel_values": pixels, "labels": labels}


def clip():
    text = {**TINY, "eos_token_id": V - 1, "bos_token_id": 0, "max_position_embeddings": 16}
    config = transformers.CLIPConfig(text_config=text, vision_config=VISION, projection_dim=8)
    return transformers.CLIPModel(config), TEXT | IMAGES


def detr():
    backbone = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", out_features=["stage2"]
    )
    layers = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    sizes = {"d_model": 16, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "num_queries": 3, "num_labels": 3}
    config = transformers.DetrConfig(
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone=None,
        backbone_config=backbone,
        **layers,
        **sizes,
    )
    boxes = torch.tensor([[0.5, 0.5, 0.2, 0.2], [0.3, 0.3, 0.1, 0.1]])
    labels = [{"class_labels": torch.tensor([0, 1])[:n], "boxes": boxes[:n]} for n in (1, 2, 1, 2)]
    return transformers.DetrForObjectDetection(config), {"pixel_values": torch.randn(B, 3, 32, 32), "labels": labels}


def multi_label():
    model = bert("SequenceClassification", num_labels=3, problem_type="multi_label_classification")
    return model, {**TEXT, "labels": torch.eye(3)[torch.tensor([0, 2, 1, 1])]}  # one label in every row by chance


def question():
    positions = {"start_positions": torch.tensor([1, 2, 0, 3]), "end_positions": torch.tensor([4, 3, 2, 5])}
    return bert("QuestionAnswering"), TEXT | positions


def electra():
    """Labels of padding are classes too; the model leaves them out by the mask."""
    return transformers.ElectraForPreTraining(transformers.ElectraConfig(**TINY, embedding_size=16)), {
        **TEXT,
        "labels": IDS % 2,
    }


def pretraining():
    return bert("PreTraining"), {**masked_lm()[1], "next_sentence_label": torch.tensor([0, 1, 1, 0])}


HEADS = {
    "bert classes": (lambda: (bert("SequenceClassification", num_labels=3), TEXT | CLASSES), "classification"),
    "bert several labels": (multi_label, "multi_label"),
    "bert regression": (
        lambda: (bert("SequenceClassification", num_labels=1), {**TEXT, "labels": torch.randn(B)}),
        "model",
    ),
    "bert masked tokens": (masked_lm, "language_modeling"),
    "bert masked tokens, tiny": (masked_lm_whose_labels_equal_its_inputs, "language_modeling"),
    "bert pretraining": (pretraining, "model"),
    "bert question": (question, "model"),
    "electra": (electra, "model"),
    "bert tokens": (
        lambda: (bert("TokenClassification", num_labels=3), {**TEXT, "labels": (TARGETS % 3).where(MASK == 1, -100)}),
        "language_modeling",
    ),
    "bert choice": (
        lambda: (
            bert("MultipleChoice"),
            {name: torch.stack([value, value.flip(0)], 1) for name, value in TEXT.items()}
            | {"labels": torch.tensor([0, 1, 1, 0])},
        ),
        "classification",
    ),
    "gpt2": (gpt2, "language_modeling"),
    "llama": (llama, "language_modeling"),
    "mixtral": (lambda: mixtral(False), "language_modeling"),
    "mixtral with its router's loss": (lambda: mixtral(True), "model"),
    "t5": (t5, "language_modeling"),
    "bart": (bart, "language_modeling"),
    "whisper": (whisper, "language_modeling"),
    "wav2vec2 ctc": (lambda: ctc("mean"), "model"),
    "vit": (vit, "classification"),
    "vit mae": (mae, "model"),
    "video mae": (video_mae, "model"),
    "segformer": (segformer, "model"),
    "clip": (clip, "model"),
    "detr": (detr, "model"),
}
NOT_ADDITIVE = {"mixtral with its router's loss", "clip", "detr", "bert pretraining"}
"""Losses that are no mean over samples or labels: those of two halves do not determine that of the whole."""


def made(name):
    torch.manual_seed(0)
    make, kind = HEADS[name]
    if name == "detr" and not transformers.utils.is_vision_available():
        pytest.skip("its loss needs Pillow")
    model, batch = make()
    return model.eval(), batch, kind


def expected_loss(model, batch):
    if "noise" in batch or type(model).__name__ != "CLIPModel":
        return model(**batch).loss
    return model(**batch, return_loss=True).loss


def rows(batch, start, stop):
    return {name: value[start:stop] for name, value in batch.items()}


@pytest.mark.parametrize("name", HEADS)
def test_the_loss_is_that_of_the_model(name):
    model, batch, kind = made(name)
    task = SupervisedTask()
    term = task(model, batch, metrics=True)["loss"]
    torch.testing.assert_close(mean_of(term), expected_loss(model, batch), rtol=1e-4, atol=1e-5)
    assert task.decisions()["kind"] == kind
    assert WORDS[kind] in task.announcement()


@pytest.mark.parametrize("name", sorted(HEADS.keys() - NOT_ADDITIVE))
def test_ragged_micro_batches_add_up_to_the_whole_batch(name):
    model, batch, _ = made(name)
    task = SupervisedTask()
    task(model, batch, metrics=False)
    terms = [task(model, rows(batch, *place), metrics=False)["loss"] for place in ((0, 1), (1, B))]
    mean = sum(term.sum for term in terms) / sum(term.count for term in terms)
    torch.testing.assert_close(mean, expected_loss(model, batch), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", HEADS)
def test_only_a_mean_is_announced_as_one(name):
    model, batch, _ = made(name)
    loss = ModelLoss()
    SupervisedTask(loss)(model, batch, metrics=False)
    assert ("not a mean" in loss.announcement()) == (name in NOT_ADDITIVE)


@pytest.mark.parametrize("name", HEADS)
def test_a_decision_is_restored(name):
    model, batch, _ = made(name)
    task, other = SupervisedTask(), SupervisedTask()
    term = task(model, batch, metrics=False)["loss"]
    other.decide(task.decisions())
    again = other(model, batch, metrics=False)["loss"]
    assert (again.sum.item(), float(again.count)) == (term.sum.item(), float(term.count))
    assert other.announcement() == ""


@pytest.mark.parametrize("name", ["gpt2", "mixtral with its router's loss", "segformer", "wav2vec2 ctc", "vit"])
def test_the_models_own_loss_on_request(name):
    model, batch, _ = made(name)
    term = SupervisedTask(ModelLoss())(model, batch, metrics=False)["loss"]
    torch.testing.assert_close(mean_of(term), expected_loss(model, batch))


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("gpt2", int(MASK.sum()) - B),
        ("bert masked tokens, tiny", 8),
        ("wav2vec2 ctc", B),
        ("segformer", 16 * 16 * B - 12 * 16),
        ("electra", int(MASK.sum())),
        ("vit", B),
    ],
)
def test_what_the_models_own_loss_is_divided_by(name, count):
    model, batch, _ = made(name)
    assert SupervisedTask(ModelLoss())(model, batch, metrics=False)["loss"].count == count


def test_a_loss_that_is_a_sum_is_refused():
    torch.manual_seed(0)
    model, batch = ctc("sum")
    with pytest.raises(TrainingError, match="ctc_loss_reduction = 'mean'"):
        SupervisedTask()(model, batch, metrics=False)


def test_padding_never_counts_even_if_its_labels_say_so():
    torch.manual_seed(0)
    model, batch = gpt2(labels=IDS)
    found, expected = (SupervisedTask()(model.eval(), one, metrics=False)["loss"] for one in (batch, NEXT))
    assert float(found.count) == float(expected.count)
    torch.testing.assert_close(found.sum, expected.sum)


def test_a_batch_without_labels_leaves_the_choice_to_the_next():
    model, batch, _ = made("bert masked tokens, tiny")
    task = SupervisedTask()
    empty = {**batch, "labels": torch.full_like(IDS, -100)}
    assert task(model, empty, metrics=False)["loss"].sum.item() == 0.0
    assert (task.decisions(), task.announcement()) == ({}, None)
    task(model, batch, metrics=False)
    assert task.decisions() == {"kind": "language_modeling", "shift": False}


def test_labels_that_are_next_tokens_are_not_shifted_again():
    torch.manual_seed(0)
    model, batch = gpt2(labels=NEXT["labels"])
    ahead = {"input_ids": IDS[:, :-1], "attention_mask": MASK[:, :-1], "labels": NEXT["labels"][:, 1:]}
    task = SupervisedTask()
    found = task(model.eval(), ahead, metrics=False)["loss"]
    torch.testing.assert_close(mean_of(found), model(**batch).loss, rtol=1e-4, atol=1e-5)
    assert task.decisions() == {"kind": "language_modeling", "shift": False}


class NeedsWholeBatches(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 2)
        self.calls = 0

    def forward(self, x, labels=None):
        self.calls += 1
        assert len(x) == B
        return {"loss": torch.nn.functional.cross_entropy(self.layer(x), labels)}


def test_a_loss_that_cannot_be_found_out_is_tried_a_few_times_only():
    model, task = NeedsWholeBatches(), SupervisedTask(ModelLoss())
    batch = torch.randn(B, 3), torch.tensor([0, 1, -100, 1])
    for _ in range(MAX_ATTEMPTS):
        assert task(model, batch, metrics=False)["loss"].count == 3
    before = model.calls
    task(model, batch, metrics=False)
    assert model.calls == before + 1


@pytest.mark.parametrize("masked", [False, True])
def test_token_batches_reach_a_model_that_shifts_its_labels_itself(masked):
    torch.manual_seed(0)
    model = gpt2()[0].eval()
    batch = {"tokens": IDS, **({"attn_mask": MASK} if masked else {})}
    ours, own = (SupervisedTask(loss)(model, batch, metrics=False)["loss"] for loss in (None, ModelLoss()))
    torch.testing.assert_close(mean_of(own), mean_of(ours), rtol=1e-4, atol=1e-5)
    assert int(own.count) == int(ours.count)


def test_soft_labels_of_a_classifier_get_cross_entropy_and_leave_its_config_alone():
    """It would take them for several labels."""
    model, batch, _ = made("vit")
    soft = torch.softmax(torch.randn(B, 3, generator=torch.Generator().manual_seed(5)), 1)
    task = SupervisedTask()
    found = mean_of(task(model, {**batch, "labels": soft}, metrics=False)["loss"])
    expected = torch.nn.functional.cross_entropy(model(batch["pixel_values"]).logits, soft)
    torch.testing.assert_close(found, expected)
    assert "sum to 1" in task.announcement()
    assert model.config.problem_type is None


@pytest.mark.parametrize("make", [gpt2, masked_lm])
def test_batches_of_one_sample_are_weighted_by_their_labels(make):
    model, batch = make()
    model.eval()
    task = SupervisedTask(ModelLoss())
    rows = [{key: value[row : row + 1] for key, value in batch.items()} for row in range(B)]
    terms = [task(model, row, metrics=False)["loss"] for row in rows]
    found = sum(term.sum for term in terms) / sum(term.count for term in terms)
    torch.testing.assert_close(found, model(**batch).loss)
