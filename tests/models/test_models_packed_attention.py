"""Packed documents without a mask: the same logits and gradients as with one, and a mask wherever one is needed."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st

from etude.core.errors import TrainingError
from etude.core.model import ModelCall
from etude.models import CausalTransformerLM
from etude.models.packed_attention import VarlenAttention, document_offsets

VOCAB, LENGTH = 37, 128


class Loop:
    """Stands in for the kernel: attention of one document after the other, on any device in any precision."""

    def __init__(self):
        self.calls = []

    def takes(self, device, dtype, head_dim):
        self.asked = (device.type, dtype, head_dim)
        return True

    def __call__(self, queries, keys, values, offsets, longest, *, causal):
        self.calls.append((tuple(queries.shape), offsets.tolist(), longest, causal))
        parts = []
        for begin, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
            assert 0 <= end - begin <= longest
            if end > begin:
                heads = (part[begin:end].transpose(0, 1) for part in (queries, keys, values))
                parts.append(F.scaled_dot_product_attention(*heads, is_causal=causal).transpose(0, 1))
        return torch.cat(parts)


def make(dropout=0.0, attention=None):
    torch.manual_seed(0)
    model = CausalTransformerLM(VOCAB, d_model=16, n_layers=2, n_heads=2, dropout=dropout, max_len=LENGTH).double()
    if attention is not None:
        model.packed_attention = attention
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def packed(lengths, places=4, length=LENGTH):
    """A batch with a row for each list of lengths; what they leave is padding, of document -1."""
    ids, starts, positions = [], [], []
    for row in lengths:
        rest = length - sum(row)
        all_of_them = [*row, rest] if rest else row
        begins = [sum(all_of_them[:number]) for number in range(len(all_of_them))]
        ids.append([number for number, size in enumerate(row) for _ in range(size)] + [-1] * rest)
        positions.append([place for size in row for place in range(size)] + [0] * rest)
        starts.append(begins + [length] * (places - len(begins)))
    torch.manual_seed(1)
    tokens = torch.randint(VOCAB, (len(lengths), length))
    found = {"input_ids": tokens, "position_ids": torch.tensor(positions), "document_ids": torch.tensor(ids)}
    return {**found, "document_starts": torch.tensor(starts, dtype=torch.int32)}


rows_of_documents = st.lists(
    st.lists(st.integers(1, 42), min_size=1, max_size=3), min_size=1, max_size=3
)  # at most 126 of 128 tokens: there is padding
full_rows = st.lists(st.integers(1, LENGTH - 1).map(lambda n: [n, LENGTH - n]), min_size=1, max_size=3)


@given(st.one_of(rows_of_documents, full_rows, st.just([[LENGTH], [1, 1, LENGTH - 2]])))
def test_offsets_are_those_of_a_loop_over_tokens(lengths):
    batch = packed(lengths)
    expected = []
    for row, ids in enumerate(batch["document_ids"].tolist()):
        begins = [row * LENGTH + at for at in range(LENGTH) if at == 0 or ids[at] != ids[at - 1]]
        expected += begins + [(row + 1) * LENGTH] * (4 - len(begins))
    offsets = document_offsets(batch["document_starts"], len(lengths), LENGTH)
    assert offsets.dtype == torch.int32
    assert offsets.tolist() == [*expected, len(lengths) * LENGTH]


@given(st.one_of(rows_of_documents, full_rows), st.integers(1, LENGTH))
def test_offsets_of_rows_cut_short_never_lead_out_of_them(lengths, kept):
    starts = packed(lengths)["document_starts"][:, :kept]
    offsets = document_offsets(starts, len(lengths), kept).tolist()
    assert offsets == sorted(offsets)
    assert offsets[0] == 0
    assert offsets[-1] == len(lengths) * kept


@pytest.mark.parametrize("causal", [True, False])
@settings(max_examples=15, deadline=None)
@given(lengths=st.one_of(rows_of_documents, full_rows))
def test_logits_and_gradients_are_those_with_a_mask(causal, lengths):
    loop, batch = Loop(), packed(lengths)
    results = []
    for model in (make(attention=loop), make()):
        logits = ModelCall(model)(model, {**batch, "causal": causal})
        logits.square().sum().backward()
        results.append([logits.detach(), *(parameter.grad for parameter in model.parameters())])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)
    offsets = document_offsets(batch["document_starts"], len(lengths), LENGTH).tolist()
    assert loop.calls == [((len(lengths) * LENGTH, 2, 8), offsets, LENGTH, causal)] * 2  # one for each layer


def test_a_compiled_model_calls_the_kernel_within_one_graph():
    class Summing(VarlenAttention):
        def takes(self, device, dtype, head_dim):
            return True

        def __call__(self, queries, keys, values, offsets, longest, *, causal):
            return queries + keys + values * offsets.sum() + longest

    model, batch = make(attention=Summing()), packed([[60, 60], [128]])
    batch["tokens"] = batch.pop("input_ids")
    compiled = torch.compile(model, backend="eager", fullgraph=True, dynamic=False)
    torch.testing.assert_close(compiled(**batch), model(**batch))


def test_dropout_of_zero_and_evaluation_need_no_mask():
    for model in (make(attention=Loop()).train(), make(dropout=0.5, attention=Loop()).eval()):
        batch = packed([[60, 60]])
        model(batch.pop("input_ids"), **batch)
        assert len(model.packed_attention.calls) == 2


@pytest.mark.parametrize("reason", ["dropout", "attn_mask", "no starts", "many places", "kernel"])
def test_there_is_a_mask_where_the_kernel_does_not_serve(reason):
    loop = Loop()
    model, batch = make(dropout=0.5 if reason == "dropout" else 0.0, attention=loop), packed([[60, 60]])
    tokens = batch.pop("input_ids")
    if reason == "attn_mask":
        batch["attn_mask"] = torch.ones_like(tokens)
    if reason == "no starts":
        del batch["document_starts"]
    if reason == "many places":
        batch["document_starts"] = packed([[60, 60]], places=8)["document_starts"]
    if reason == "kernel":
        model.packed_attention = VarlenAttention()  # float64 on the CPU
    model(tokens, **batch)
    assert not loop.calls


def test_the_type_that_autocast_computes_in_decides():
    loop, batch = Loop(), packed([[60, 60]])
    model = make(attention=loop).float()
    tokens = batch.pop("input_ids")
    model(tokens, **batch)
    assert loop.asked == ("cpu", torch.float32, 8)
    with torch.autocast("cpu", torch.bfloat16):
        model(tokens, **batch)
    assert loop.asked == ("cpu", torch.bfloat16, 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_kernel_is_for_cuda(dtype):
    assert not VarlenAttention().takes(torch.device("cpu"), dtype, 64)
    assert not VarlenAttention().takes(torch.device("cuda", 0), torch.float32, 64)
    assert not VarlenAttention().takes(torch.device("cuda", 0), dtype, 12)


def test_starts_that_are_not_of_the_rows_are_refused():
    with pytest.raises(TrainingError, match=r"document_starts.*\(1, 4\)"):
        document_offsets(torch.zeros(1, 4), rows=2, length=128)


def test_a_model_that_does_not_name_them_is_not_given_starts():
    seen = {}

    class Other(torch.nn.Module):
        def forward(self, input_ids, **others):
            seen.update(others)
            return input_ids

    model = Other()
    ModelCall(model)(model, packed([[60, 60]]))
    assert seen.keys() == {"position_ids", "document_ids"}


def test_what_the_device_can_do_is_a_constant_for_the_compiler(monkeypatch):
    asked = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: asked.append(index) or (9, 0))

    def call(x):
        return x + VarlenAttention().takes(torch.device("cuda", 3), torch.bfloat16, 64)

    compiled = torch.compile(call, backend="eager", fullgraph=True)
    assert [compiled(torch.full((2,), n)).tolist() for n in (1.0, 2.0, 3.0)] == [[2.0] * 2, [3.0] * 2, [4.0] * 2]
    assert asked == [3]
