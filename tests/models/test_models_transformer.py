"""The causal transformer is its formula and sees the past of its own document alone."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from small_transformer import VOCAB, draw, make
from torch import nn

from etude.config import lookup
from etude.core.errors import ConfigError, TrainingError
from etude.core.model import ModelCall
from etude.losses import LanguageModelingLoss, SupervisedTask
from etude.models import CausalTransformerLM
from etude.models.attention import attention_mask


def turned(vector, position):
    """Turn feature pairs (i, i + E/2) as complex numbers: the definition of rotary positions."""
    half = len(vector) // 2
    pairs = torch.complex(vector[:half], vector[half:])
    angles = torch.tensor([position / 10_000 ** (2 * i / len(vector)) for i in range(half)], dtype=torch.float64)
    pairs = pairs * torch.polar(torch.ones(half, dtype=torch.float64), angles)
    return torch.cat([pairs.real, pairs.imag])


def norm(x, weight):
    return weight * x / (x.square().mean() + torch.finfo(torch.float64).eps).sqrt()


def by_the_formula(model, row, sees, positions, types=None):
    """Return the logits (L, V) of one row, one position, head and number at a time; `sees(t, s)` is the mask."""
    weights = dict(model.named_parameters())
    heads, size = model.n_heads, model.head_dim
    stream = [weights["embedding.weight"][token] for token in row]
    if types is not None:
        stream = [x + weights["type_embedding.weight"][kind] for x, kind in zip(stream, types, strict=True)]
    for layer in range(len(model.blocks)):
        of = {name.removeprefix(f"blocks.{layer}."): value for name, value in weights.items()}
        triples = [of["attention.qkv.weight"] @ norm(x, of["attention_norm.weight"]) for x in stream]
        queries, keys, values = ([t.view(heads, 3, size)[:, part] for t in triples] for part in range(3))
        gathered = []
        for t in range(len(stream)):
            seen = [s for s in range(len(stream)) if sees(t, s)]
            parts = []
            for head in range(heads):
                query = turned(queries[t][head], positions[t])
                scores = torch.stack([query @ turned(keys[s][head], positions[s]) for s in seen]) / math.sqrt(size)
                parts.append(sum(p * values[s][head] for p, s in zip(scores.softmax(0), seen, strict=True)))
            gathered.append(torch.cat(parts))
        stream = [x + of["attention.project.weight"] @ g for x, g in zip(stream, gathered, strict=True)]
        hidden = [of["mlp.up.weight"] @ norm(x, of["mlp_norm.weight"]) for x in stream]
        act = [h * 0.5 * (1 + torch.erf(h / math.sqrt(2))) for h in hidden]
        stream = [x + of["mlp.down.weight"] @ a for x, a in zip(stream, act, strict=True)]
    output = weights.get("head.weight", weights["embedding.weight"])
    return torch.stack([output @ norm(x, weights["norm.weight"]) for x in stream])


@pytest.mark.parametrize("tie", [True, False])
def test_the_logits_are_those_of_the_formula(tie):
    model, tokens = make(tie_embeddings=tie), draw(2, 6)
    expected = torch.stack([by_the_formula(model, row, lambda t, s: s <= t, range(6)) for row in tokens])
    torch.testing.assert_close(model(tokens), expected, rtol=1e-5, atol=1e-5)  # angles are float32


def test_types_masks_documents_and_positions_are_those_of_the_formula():
    model, tokens, types = make(n_types=4), draw(1, 7), draw(1, 7, high=4)
    mask = torch.tensor([[1, 1, 0, 1, 1, 1, 0]])
    documents = torch.tensor([[0, 0, 0, 0, 1, 1, 1]])
    positions = torch.tensor([[0, 1, 2, 3, 9, 11, 12]])

    def sees(t, s):
        return s == t or (s < t and bool(mask[0, s]) and bool(documents[0, s] == documents[0, t]))

    expected = by_the_formula(model, tokens[0], sees, positions[0].tolist(), types[0])
    found = model(tokens, types, mask, position_ids=positions, document_ids=documents)
    torch.testing.assert_close(found[0], expected, rtol=1e-5, atol=1e-5)


def test_it_is_a_llama_of_transformers_with_the_same_attention():
    """The attention of another library, weights copied; its gated MLP is replaced by ours."""
    transformers = pytest.importorskip("transformers")
    model, tokens = make(), draw(3, 9)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=24, intermediate_size=96, num_hidden_layers=2, num_attention_heads=3,
        num_key_value_heads=3, max_position_embeddings=32, rms_norm_eps=torch.finfo(torch.float64).eps,
        rope_theta=10_000.0, tie_word_embeddings=True,
    )  # fmt: skip
    other = transformers.LlamaForCausalLM(config).double().eval()
    with torch.no_grad():
        other.model.embed_tokens.weight.copy_(model.embedding.weight)
        other.model.norm.weight.copy_(model.norm.weight)
        for theirs, ours in zip(other.model.layers, model.blocks, strict=True):
            names = (theirs.self_attn.q_proj, theirs.self_attn.k_proj, theirs.self_attn.v_proj)
            for linear, weight in zip(names, ours.attention.qkv.weight.view(3, 3, 8, 24).unbind(1), strict=True):
                linear.weight.copy_(weight.flatten(0, 1))
            theirs.self_attn.o_proj.weight.copy_(ours.attention.project.weight)
            theirs.input_layernorm.weight.copy_(ours.attention_norm.weight)
            theirs.post_attention_layernorm.weight.copy_(ours.mlp_norm.weight)
            theirs.mlp = ours.mlp
        torch.testing.assert_close(model(tokens), other(tokens).logits, rtol=1e-5, atol=1e-5)
        mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1]] * 3)
        ours, theirs = model(tokens, attn_mask=mask), other(tokens, attention_mask=mask).logits
        torch.testing.assert_close(ours[:, 2:], theirs[:, 2:], rtol=1e-5, atol=1e-5)


@settings(max_examples=20, deadline=None)
@given(length=st.integers(2, 12), place=st.integers(0, 11), seed=st.integers(0, 99))
def test_a_token_changes_no_logits_before_it(length, place, seed):
    model, tokens = make(), draw(1, length, seed=seed)
    place %= length
    other = tokens.clone()
    other[0, place] = (other[0, place] + 1) % VOCAB
    before, after = model(tokens), model(other)
    assert before[:, :place].equal(after[:, :place])
    assert not before[:, place:].isclose(after[:, place:]).all(-1).any()


@settings(max_examples=20, deadline=None)
@given(left=st.integers(0, 4), right=st.integers(0, 4), length=st.integers(1, 8))
def test_padding_on_either_side_changes_nothing(left, right, length):
    model, tokens = make(), draw(2, length)
    padded = F.pad(tokens, (left, right), value=5)
    mask = F.pad(torch.ones_like(tokens), (left, right))
    found = model(padded, attn_mask=mask)
    assert found.isfinite().all()
    torch.testing.assert_close(found[:, left : left + length], model(tokens), rtol=1e-4, atol=1e-4)


def test_rows_that_see_nothing_are_finite_in_both_directions():
    model = make().train()
    model(draw(2, 5), attn_mask=torch.zeros(2, 5, dtype=torch.int64)).logsumexp(-1).sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


@settings(max_examples=20, deadline=None)
@given(lengths=st.lists(st.integers(1, 7), min_size=1, max_size=4), reset=st.booleans())
def test_packed_documents_are_as_if_each_were_alone(lengths, reset):
    model = make()
    documents = [draw(1, length, seed=place) for place, length in enumerate(lengths)]
    ids = torch.cat([torch.full((1, length), place) for place, length in enumerate(lengths)], 1)
    positions = torch.cat([torch.arange(length)[None] for length in lengths], 1) if reset else None
    packed = model(torch.cat(documents, 1), document_ids=ids, position_ids=positions)
    alone = torch.cat([model(document) for document in documents], 1)
    torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-4)


def test_the_mask_is_left_out_where_the_causal_order_says_it_all():
    assert attention_mask(draw(2, 5), None, None) is None
    plain, masked = make()(draw(2, 5)), make()(draw(2, 5), attn_mask=torch.ones(2, 5))
    torch.testing.assert_close(plain, masked)


def test_only_differences_of_positions_matter():
    model, tokens = make(), draw(1, 8)
    found = model(tokens, position_ids=torch.arange(8)[None] + 20)
    torch.testing.assert_close(found, model(tokens), rtol=1e-4, atol=1e-4)
    assert (
        not model(tokens, position_ids=2 * torch.arange(8)[None])[:, 1:].isclose(model(tokens)[:, 1:]).any(-1).all()
    )


def test_gradients_are_those_of_finite_differences():
    model, tokens = make(d_model=8, n_heads=2, n_layers=1), draw(2, 5)
    names = [name for name, _ in model.named_parameters()]

    def loss(*values):
        logits = torch.func.functional_call(model, dict(zip(names, values, strict=True)), (tokens,))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    values = [parameter.detach().clone().requires_grad_() for parameter in model.parameters()]
    assert torch.autograd.gradcheck(loss, values, fast_mode=True)


def test_parameters_are_counted_once_and_scaled():
    model = CausalTransformerLM(vocab_size=1000, d_model=64, n_layers=8, n_heads=4, max_len=16)
    assert model.num_parameters() == 1000 * 64 + 8 * (12 * 64 * 64 + 2 * 64) + 64
    untied = CausalTransformerLM(vocab_size=1000, d_model=64, n_layers=8, n_heads=4, max_len=16, tie_embeddings=False)
    assert untied.num_parameters() == model.num_parameters() + 1000 * 64
    narrow = CausalTransformerLM(vocab_size=10, d_model=64, n_layers=1, n_heads=4, d_ff=32, n_types=3)
    assert narrow.num_parameters() == 10 * 64 + 3 * 64 + 4 * 64 * 64 + 2 * 32 * 64 + 3 * 64
    for block in model.blocks:
        assert block.mlp.down.weight.std().item() == pytest.approx(0.02 / 4, rel=0.1)
        assert block.attention.project.weight.std().item() == pytest.approx(0.02 / 4, rel=0.1)
        assert block.attention.qkv.weight.std().item() == pytest.approx(0.02, rel=0.1)


def test_dropout_acts_in_training_only_and_repeats_with_the_seed():
    model, tokens = make(dropout=0.5).train(), draw(2, 6)
    torch.manual_seed(3)
    first, second = model(tokens), model(tokens)
    torch.manual_seed(3)
    assert first.equal(model(tokens))
    assert not first.equal(second)
    assert model.eval()(tokens).equal(model(tokens))


def test_dropout_follows_the_embedding_and_both_parts_of_every_block():
    model, sizes = make(dropout=0.5, d_ff=40), []
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.register_forward_hook(lambda _, inputs, output: sizes.append(output.numel()))
    model(draw(2, 6))
    assert sizes == [2 * 6 * 24] * (1 + 2 * 2)


def test_it_learns_to_repeat():
    torch.manual_seed(0)
    model = CausalTransformerLM(vocab_size=16, d_model=32, n_layers=2, n_heads=2, dropout=0.0, max_len=16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(150):
        half = draw(32, 8, seed=step, high=16)
        tokens = torch.cat([half, half], 1)
        loss = F.cross_entropy(model(tokens[:, :-1])[:, 7:].flatten(0, 1), tokens[:, 8:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    half = draw(1, 8, seed=9999, high=16)
    assert model.generate(half[0], 8, temperature=0)[8:].tolist() == half[0].tolist()


def test_mistakes_are_explained():
    model = make()
    with pytest.raises(ConfigError, match=r"d_model 30 with n_heads 4: .* make d_model a multiple of 8"):
        CausalTransformerLM(vocab_size=10, d_model=30, n_heads=4)
    with pytest.raises(TrainingError, match="sequences have 33 tokens, but the model's max_len is 32"):
        model(draw(1, 33))
    with pytest.raises(TrainingError, match=r"tokens have the shape \(4,\); pass \(batch, length\)"):
        model(draw(4))
    with pytest.raises(TrainingError, match="types were given, but the model has n_types 0"):
        model(draw(1, 4), draw(1, 4))
    with pytest.raises(TrainingError, match="no types were given, but the model has n_types 2"):
        make(n_types=2)(draw(1, 4))
    with pytest.raises(TrainingError, match=r"attn_mask has the shape \(1, 1, 4, 4\); pass 1 for tokens"):
        model(draw(1, 4), attn_mask=torch.ones(1, 1, 4, 4))
    with pytest.raises(TrainingError, match="at least one token"):
        model.generate(draw(0), 3)


@pytest.mark.parametrize("name", ["causal_transformer_lm", "transformer_lm"])
def test_it_is_registered(name):
    assert lookup("model", name).factory is CausalTransformerLM


def test_a_loss_may_run_it_without_its_output_layer():
    model = make().train()
    tokens = draw(2, 9)
    batch = {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}
    gradients = []
    for fused in (False, True):
        loss = SupervisedTask(LanguageModelingLoss(fused_head=fused))(model, batch, metrics=False)["loss"]
        model.zero_grad()
        loss.sum.backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    for plain, fused in zip(*gradients, strict=True):
        torch.testing.assert_close(fused, plain, rtol=1e-6, atol=1e-8)


def test_batches_of_all_forms_reach_it():
    tokens, mask = draw(2, 6), torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0]])
    documents = torch.tensor([[0, 0, 0, 1, 1, 1]] * 2)
    model = make()
    call = ModelCall(model)
    found = call(model, {"input_ids": tokens, "labels": tokens, "attention_mask": mask, "document_ids": documents})
    assert found.equal(model(tokens, attn_mask=mask, document_ids=documents))
    typed, types = make(n_types=3), draw(2, 6, high=3)
    found = ModelCall(typed)(typed, {"tokens": tokens, "types": types, "attn_mask": mask})
    assert found.equal(typed(tokens[:, :-1], types[:, :-1], mask[:, :-1]))


def test_the_first_loss_is_near_that_of_guessing():
    torch.manual_seed(0)
    model = CausalTransformerLM(2048, d_model=192, n_layers=2, n_heads=6, max_len=64)
    tokens = torch.randint(2048, (8, 65))
    loss = torch.nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    assert abs(loss.item() - math.log(2048)) < 0.3


MASKS = {"no padding": None, "padding": [[1, 1, 0, 1, 1, 1, 0]]}
DOCUMENTS = {"one document": None, "documents": [[0, 0, 0, 0, 1, 1, 1]]}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("documents", DOCUMENTS.values(), ids=DOCUMENTS)
def test_without_the_causal_order_positions_see_all_of_their_document_but_padding(mask, documents):
    model, tokens = make(), draw(1, 7)

    def sees(t, s):
        same = documents is None or documents[0][s] == documents[0][t]
        return s == t or (same and (mask is None or bool(mask[0][s])))

    arguments = {
        "attn_mask": None if mask is None else torch.tensor(mask),
        "document_ids": None if documents is None else torch.tensor(documents),
    }
    expected = by_the_formula(model, tokens[0], sees, range(7))
    found = model(tokens, **arguments, causal=False)
    torch.testing.assert_close(found[0], expected, rtol=1e-5, atol=1e-5)
    assert not found.isclose(model(tokens, **arguments)).all()


@settings(max_examples=20, deadline=None)
@given(place=st.integers(0, 8), seed=st.integers(0, 99))
def test_without_the_causal_order_a_token_changes_its_document_alone_and_padding_nothing(place, seed):
    model, tokens = make(), draw(1, 9, seed=seed)
    documents, mask = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1, 1]]), torch.tensor([[1, 1, 1, 0, 1, 1, 1, 1, 0]])
    other = tokens.clone()
    other[0, place] = (other[0, place] + 1) % VOCAB
    before, after = (model(t, attn_mask=mask, document_ids=documents, causal=False) for t in (tokens, other))
    changed = (~before.isclose(after).all(-1))[0]
    reached = documents[0] == documents[0, place] if mask[0, place] else torch.arange(9) == place
    # A padded position is free to see others; what matters is that no other sees it.
    assert changed.equal(reached)


def test_only_padding_or_documents_need_a_mask():
    tokens = draw(2, 5)
    assert attention_mask(tokens, None, None, causal=False) is None
    assert attention_mask(tokens, torch.ones(2, 5), None, causal=False).all()


def test_the_features_are_what_the_output_layer_is_given():
    model, tokens, mask = make(tie_embeddings=False), draw(2, 6), torch.tensor([[1] * 6, [1] * 3 + [0] * 3])
    given_to_the_layer = []
    model.head.register_forward_pre_hook(lambda _, inputs: given_to_the_layer.append(inputs[0]))
    logits = model(tokens, attn_mask=mask, causal=False)
    features = model.features(tokens, attn_mask=mask, causal=False)
    assert features.equal(given_to_the_layer[0])
    assert features.shape[-1] == model.feature_dim == 24
    assert logits.equal(model.get_output_embeddings()(features))


def test_a_batch_asks_for_the_whole_context_by_a_key():
    model, ids = make(), draw(2, 6)
    call = ModelCall(model)
    batch = {"input_ids": ids, "labels": ids, "stream": "code"}
    assert call(model, {**batch, "causal": False}).equal(model(ids, causal=False))
    assert call(model, batch).equal(model(ids))
    tokens = {"tokens": ids, "causal": False}
    assert call(model, tokens).equal(model(ids[:, :-1], causal=False))


@pytest.mark.parametrize("packed", [False, True])
def test_compiled_code_computes_the_angles_once(packed):
    torch.manual_seed(0)
    model = CausalTransformerLM(vocab_size=11, d_model=16, n_layers=3, n_heads=2, dropout=0.0, max_len=8)
    tokens = torch.randint(11, (2, 8))
    extra = {"position_ids": torch.arange(8).remainder(5).expand(2, 8)} if packed else {}
    called = []

    def backend(graph, _example):
        called.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    compiled = torch.compile(model, backend=backend, fullgraph=True)
    torch.testing.assert_close(compiled(tokens, **extra), model(tokens, **extra))
    assert sum("rotary_angles" in name for name in called) == 1
    assert not any("cos" in name for name in called)
