"""Models of Hugging Face as the trunk of a multi-task model: what they do is found out by running them."""

import pytest
import torch
from model_batches import VOCAB, WIDTH, batch, counted, ids
from torch import nn

from etude.core.errors import ConfigError, TrainingError
from etude.models import feature_dim
from etude.models.huggingface_trunk import HuggingFaceTrunk
from etude.multitask import (
    BinaryHead,
    LanguageModelHead,
    MultiTaskModel,
    SequenceClassifier,
)


class Tiny:
    """Small models of another library, with random weights."""

    def __init__(self):
        self.lib = pytest.importorskip("transformers")
        self.sizes = {"hidden_size": WIDTH, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 2}

    def gpt2(self, attention="sdpa", kind="GPT2LMHeadModel", **more):
        config = self.lib.GPT2Config(
            n_embd=WIDTH, n_layer=2, n_head=2, vocab_size=VOCAB, n_positions=16, attn_implementation=attention,
            bos_token_id=None, eos_token_id=None, **more,
        )  # fmt: skip
        return self.spread(getattr(self.lib, kind)(config))

    def bert(self, kind="BertModel"):
        config = self.lib.BertConfig(**self.sizes, vocab_size=VOCAB, max_position_embeddings=16)
        return self.spread(getattr(self.lib, kind)(config))

    def llama_like(self, kind, **more):
        config = getattr(self.lib, f"{kind}Config")(**self.sizes, vocab_size=VOCAB, **more)
        return self.spread(getattr(self.lib, f"{kind}ForCausalLM")(config))

    def spread(self, model):
        """Enlarge the weights, so that tokens matter to each other."""
        torch.manual_seed(0)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.2 * torch.randn_like(parameter))
        return model.eval()


@pytest.fixture
def tiny():
    return Tiny()


def test_gpt2_as_a_trunk(tiny):
    trunk = tiny.gpt2()
    heads = {"code": LanguageModelHead(), "quality": SequenceClassifier(3, in_features=feature_dim(trunk))}
    model, inputs = MultiTaskModel(trunk, heads).eval(), batch()
    layers = counted(trunk.lm_head)
    outputs = model(inputs, ["code", "quality"])
    assert not layers  # the output layer is left to the loss
    expected = trunk(
        input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], output_hidden_states=True
    )
    torch.testing.assert_close(outputs["code"].logits, expected.logits)
    real = inputs["attention_mask"][..., None]
    means = (expected.hidden_states[-1] * real).sum(1) / real.sum(1)
    torch.testing.assert_close(outputs["quality"], heads["quality"].classify(means))
    assert model.last_shared_layer(inputs) == "trunk.transformer.h.1"


def test_bert_as_a_trunk_with_an_output_layer_of_the_head(tiny):
    trunk = tiny.bert()
    model = MultiTaskModel(
        trunk, {"words": LanguageModelHead(vocab_size=VOCAB), "yes": BinaryHead(in_features=WIDTH)}
    )
    inputs = {**batch(), "causal": False}
    outputs = model.eval()(inputs, ["words", "yes"])
    hidden = trunk(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).last_hidden_state
    torch.testing.assert_close(outputs["words"].logits, hidden @ model.heads["words"].layer.weight.T)
    assert outputs["yes"].shape == (3, 1)
    assert model.last_shared_layer(inputs) == "trunk.encoder.layer.1"


def test_what_an_architecture_does_is_found_out_by_running_it(tiny):
    def found(model):
        trunk = HuggingFaceTrunk(model)
        return trunk.has_output, trunk.sees_ahead

    assert found(tiny.gpt2()) == (True, False)
    assert found(tiny.bert()) == (False, True)
    assert found(tiny.bert("BertForMaskedLM")) == (False, True)  # a layer between features and output layer
    assert found(tiny.llama_like("Granite", logits_scaling=4.0)) == (False, False)
    capped = tiny.llama_like("Gemma2", head_dim=8, num_key_value_heads=2, final_logit_softcapping=0.5)
    assert found(capped) == (True, False)
    model = MultiTaskModel(capped, {"code": LanguageModelHead()}).eval()
    torch.testing.assert_close(model(ids(), ["code"])["code"].logits, capped(input_ids=ids()).logits)


class Adapted(nn.Module):
    """Wraps a model as adapters of other libraries do: its base is the whole model, to which the rest is handed on."""

    def __init__(self, base_model):
        super().__init__()
        self.base_model = base_model

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.base_model, name)

    def forward(self, *args, **kwargs):
        return self.base_model(*args, **kwargs)


def test_a_model_in_wrappers_of_adapters_is_found(tiny):
    trunk = tiny.gpt2()
    plain, wrapped = (MultiTaskModel(t, {"code": LanguageModelHead()}) for t in (trunk, Adapted(Adapted(trunk))))
    assert feature_dim(wrapped.trunk) == WIDTH
    assert wrapped(batch(), ["code"])["code"].logits.equal(plain(batch(), ["code"])["code"].logits)


def test_labels_of_tasks_are_not_handed_to_a_model_that_takes_anything(tiny):
    trunk, given_names = tiny.gpt2(), []
    model = MultiTaskModel(trunk, {"code": LanguageModelHead()})
    trunk.transformer.register_forward_pre_hook(lambda *args: given_names.append(set(args[-1])), with_kwargs=True)
    model(batch(), ["code"])
    assert given_names == [{"input_ids", "attention_mask", "use_cache"}]


def test_no_keys_and_values_are_kept_in_training(tiny):
    trunk, kept = tiny.gpt2(), []
    model = MultiTaskModel(trunk, {"code": LanguageModelHead()})
    trunk.transformer.register_forward_hook(lambda *args: kept.append(args[-1].past_key_values))
    for form in (batch(), ids(), (ids(), ids())):
        model(form, ["code"])
    assert kept
    assert all(cache is None for cache in kept)


def test_finding_out_leaves_no_trace(tiny):
    model = tiny.gpt2(resid_pdrop=0.1)
    model.train()
    before = torch.get_rng_state()
    HuggingFaceTrunk(model)
    assert torch.get_rng_state().equal(before)
    assert all(module.training for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_causal_model_that_cannot_see_ahead_says_so(tiny):
    model = MultiTaskModel(tiny.gpt2(), {"code": LanguageModelHead()})
    with pytest.raises(TrainingError, match="GPT2LMHeadModel is causal"):
        model({"input_ids": ids(), "causal": False}, ["code"])


def test_an_encoder_decoder_is_refused(tiny):
    config = tiny.lib.T5Config(d_model=WIDTH, d_kv=8, d_ff=20, num_layers=1, num_heads=2, vocab_size=VOCAB)
    with pytest.raises(ConfigError, match="use its encoder"):
        MultiTaskModel(tiny.lib.T5ForConditionalGeneration(config), {})
