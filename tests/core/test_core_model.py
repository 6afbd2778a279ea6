"""Every form of batch reaches the model's forward as its user means it."""

from collections import UserDict, namedtuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence

from batch_classes import Plain, graphs
from etude.core.batch import STREAM, DataBatch, JointBatch, inputs_of, padding_mask_of, targets_of
from etude.core.errors import TrainingError
from etude.core.model import ModelCall, unwrap

X, Y = torch.randn(4, 3), torch.tensor([0, 1, 2, 0])
IDS = torch.arange(20).view(4, 5)
MASK = torch.ones(4, 5, dtype=torch.long)


def module(forward):
    """A module with this forward, called as a method."""
    return type("Recorder", (nn.Module,), {"forward": forward})()


def call(model, batch):
    return ModelCall(model)(model, batch)


@pytest.mark.parametrize(
    "batch", [X, (X,), [X], (X, Y), [X, Y], DataBatch(X, Y), DataBatch(X, None), namedtuple("Pair", "a b")(X, Y)]
)
def test_one_input_is_the_only_argument(batch):
    (seen,) = call(module(lambda self, *args, **kwargs: args), batch)
    assert seen is X


def test_all_but_the_last_of_a_longer_tuple_are_inputs():
    a, b, c = torch.zeros(4), torch.ones(4), torch.full((4,), 2.0)
    assert call(module(lambda self, *args: args), (a, b, c, Y)) == (a, b, c)


def test_a_mapping_passes_what_forward_names_and_never_the_labels():
    def forward(self, input_ids, attention_mask=None, labels=None):
        return input_ids, attention_mask, labels

    batch = {"input_ids": IDS, "attention_mask": MASK, "labels": Y, "index": Y}
    ids, mask, labels = call(module(forward), batch)
    assert ids is IDS
    assert mask is MASK
    assert labels is None


def test_a_user_dict_is_a_mapping():
    class Encoding(UserDict):
        """As tokenizers return it."""

    assert call(module(lambda self, input_ids: input_ids), Encoding(input_ids=IDS, labels=Y)) is IDS


def test_a_forward_with_any_keyword_gets_all_inputs():
    seen = call(module(lambda self, input_ids, **kwargs: kwargs), {"input_ids": IDS, "extra": X, "labels": Y})
    assert list(seen) == ["extra"]
    seen = call(module(lambda self, *args, **kwargs: (args, kwargs)), {"input_ids": IDS, "extra": X})
    assert seen == ((), {"input_ids": IDS, "extra": X})


@pytest.mark.parametrize(
    "forward",
    [
        lambda self, x: x,
        lambda self, x, /: x,
        lambda self, *xs: xs[0],
        lambda self, x, **kwargs: x,
        lambda self, x, attention_mask=None: x,
    ],
)
def test_input_ids_go_to_the_first_argument_whatever_its_name(forward):
    assert call(module(forward), {"input_ids": IDS, "attention_mask": MASK, "labels": Y}) is IDS


def test_the_mask_still_goes_by_name_when_the_ids_go_by_position():
    forward = lambda self, x, attention_mask: (x, attention_mask)
    x, mask = call(module(forward), {"attention_mask": MASK, "input_ids": IDS})
    assert x is IDS
    assert mask is MASK


def test_the_ids_do_not_take_a_first_argument_that_the_batch_names():
    batch = {"inputs_embeds": X, "input_ids": IDS}
    embeds, others = call(module(lambda self, inputs_embeds, **kwargs: (inputs_embeds, kwargs)), batch)
    assert embeds is X
    assert others["input_ids"] is IDS


def test_a_lone_input_of_any_name_goes_to_the_first_argument():
    assert call(nn.Linear(3, 2), {"image": X, "label": Y}).shape == (4, 2)


def test_a_forward_that_requires_labels_gets_them():
    assert call(module(lambda self, input_ids, labels: labels), {"input_ids": IDS, "labels": Y}) is Y


def test_an_encoder_decoder_gets_the_labels_its_decoder_inputs_are_made_of():
    def forward(self, input_ids=None, decoder_input_ids=None, labels=None):
        return labels, decoder_input_ids

    assert call(module(forward), {"input_ids": IDS, "labels": Y}) == (Y, None)
    assert call(module(forward), {"input_ids": IDS, "labels": Y, "decoder_input_ids": X}) == (None, X)


NEXT_TOKEN = {"tokens": IDS, "types": IDS + 100, "attn_mask": MASK}


@pytest.mark.parametrize(
    "forward",
    [
        lambda self, tokens, types, attn_mask: (tokens, types, attn_mask),
        lambda self, x, kinds, real: (x, kinds, real),
        lambda self, x, attn_mask, types: (x, types, attn_mask),
        lambda self, *args: args,
        lambda self, **kwargs: (kwargs["tokens"], kwargs["types"], kwargs["attn_mask"]),
        lambda self, *, tokens, types, attn_mask: (tokens, types, attn_mask),
        lambda self, x, **kwargs: (x, kwargs["types"], kwargs["attn_mask"]),
    ],
)
def test_a_next_token_batch_leaves_out_the_last_position(forward):
    tokens, types, mask = call(module(forward), NEXT_TOKEN)
    torch.testing.assert_close(tokens, IDS[:, :-1])
    torch.testing.assert_close(types, IDS[:, :-1] + 100)
    torch.testing.assert_close(mask, MASK[:, :-1])


def test_types_and_mask_of_a_next_token_batch_are_optional():
    assert call(module(lambda self, tokens, types=None, attn_mask=None: types), {"tokens": IDS}) is None
    torch.testing.assert_close(call(module(lambda self, x: x), NEXT_TOKEN), IDS[:, :-1])
    without_types = {"tokens": IDS, "attn_mask": MASK}
    tokens, types, mask = call(module(lambda self, x, kinds, real: (x, kinds, real)), without_types)
    assert tokens.shape == mask.shape == (4, 4)
    assert types is None
    _, mask = call(module(lambda self, x, real: (x, real)), without_types)
    torch.testing.assert_close(mask, MASK[:, :-1])


def test_tokens_with_labels_are_passed_whole():
    assert call(module(lambda self, tokens: tokens), {"tokens": IDS, "labels": Y}) is IDS


def test_a_mapping_that_does_not_fit_names_arguments_and_keys():
    model = module(lambda self, left, right, scale=1.0: left)
    expected = (
        r"^the batch does not fit the model: forward takes \(left, right, scale=…\), "
        r"the batch has the keys left, wright, labels; it lacks right$"
    )
    with pytest.raises(TrainingError, match=expected):
        call(model, {"left": X, "wright": X, "labels": Y})
    with pytest.raises(TrainingError, match="none of them fits"):
        call(module(lambda self, scale=1.0: scale), {"a": X, "b": X})


@pytest.mark.parametrize(("batch", "found"), [((), "an empty tuple"), (3, "int"), (None, "NoneType"), ("x", "str")])
def test_what_is_no_batch_is_named(batch, found):
    with pytest.raises(TrainingError, match=f"found {found}$"):
        call(nn.Linear(3, 2), batch)


def test_samples_of_several_streams_together_are_for_several_tasks():
    streams = JointBatch([{"x": X, STREAM: "a"}, {"x": X, STREAM: "b"}])
    with pytest.raises(TrainingError, match="of several streams"):
        call(nn.Linear(3, 2), streams)


@pytest.mark.parametrize("batch", [graphs([2, 3]), Plain(X, Y), pack_sequence([X])])
def test_objects_are_given_to_the_model_whole(batch):
    assert call(module(lambda self, batch: batch), batch) is batch


def test_the_signature_is_read_through_wrappers():
    inner = module(lambda self, input_ids: input_ids)
    assert unwrap(nn.DataParallel(inner)) is inner
    compiled = torch.compile(inner, backend="eager")
    assert unwrap(compiled) is inner
    assert ModelCall(compiled)(inner, {"input_ids": IDS, "other": X}) is IDS


def test_the_signature_is_read_once(monkeypatch):
    import inspect

    model = module(lambda self, input_ids: input_ids)
    model_call = ModelCall(model)
    monkeypatch.setattr(inspect, "signature", lambda *_: pytest.fail("read again"))
    for batch in ({"input_ids": IDS}, {"input_ids": IDS, "labels": Y}, (X, Y)):
        model_call(model, batch)


def test_a_plain_function_can_be_called_too():
    assert call(lambda x: x + 1, (X, Y)).equal(X + 1)


@pytest.mark.parametrize(
    ("batch", "labels", "shifted"),
    [
        (X, None, False),
        ((X,), None, False),
        ((X, Y), Y, False),
        ([X, X, Y], Y, False),
        (DataBatch(X, None), None, False),
        ({"input_ids": IDS}, None, False),
        ({"input_ids": IDS, "targets": Y}, Y, False),
        ({"tokens": IDS}, IDS[:, 1:], True),
        ({"tokens": IDS, "labels": Y}, Y, False),
    ],
)
def test_targets(batch, labels, shifted):
    found, already_shifted = targets_of(batch)
    assert already_shifted is shifted
    assert found is labels or found.equal(labels)


def test_the_padding_mask_lines_up_with_the_targets():
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    assert padding_mask_of((X, Y)) is None
    assert padding_mask_of({"input_ids": IDS}) is None
    assert padding_mask_of({"input_ids": IDS, "attention_mask": mask}) is mask
    assert padding_mask_of({"tokens": IDS, "attn_mask": mask}).equal(mask[:, 1:])
    assert padding_mask_of({"input_ids": IDS, "attention_mask": torch.ones(2, 1, 3, 3)}) is None


@pytest.mark.parametrize("batch", [X, (X, Y), {"labels": Y, "image": X}, {"a": Y, "input_ids": X}, DataBatch(X, Y)])
def test_the_main_input(batch):
    found = inputs_of(batch)
    assert isinstance(found, Tensor)
    assert found is X


def test_next_tokens_and_their_mask_reach_models_that_call_the_mask_otherwise():
    batch = {"tokens": IDS, "types": IDS + 100, "attn_mask": MASK}
    for forward in (
        lambda self, input_ids, attention_mask=None, position_ids=None: (input_ids, attention_mask, position_ids),
        lambda self, input_ids, past_key_values=None, attention_mask=None: (
            input_ids,
            attention_mask,
            past_key_values,
        ),
    ):
        ids, mask, other = call(module(forward), batch)
        assert torch.equal(ids, IDS[:, :-1])
        assert torch.equal(mask, MASK[:, :-1])
        assert other is None


def test_next_tokens_alone_go_where_the_other_positions_mean_something_else():
    ids, *others = call(
        module(lambda self, ids, position_ids=None, labels=None: (ids, position_ids, labels)),
        {"tokens": IDS, "types": IDS, "attn_mask": MASK},
    )
    assert torch.equal(ids, IDS[:, :-1])
    assert others == [None, None]
