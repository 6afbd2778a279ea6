"""Vocabularies of several modalities: ranges of ids, against a table that lists every id one by one."""

import copy
import dataclasses
import json
import pickle
import re

import pytest
import torch
from hypothesis import given, settings, strategies as st

from etude.core import ConfigError, DataError
from etude.multimodal import Modality, VocabSpec, build_vocab_spec
from etude.multimodal.vocab import SPECIAL

PLAIN = {"PAD": 0, "MISS": 1}
SIZES = st.dictionaries(
    st.from_regex(r"[a-z][a-z0-9_-]{0,6}", fullmatch=True).filter(lambda name: name.isascii()),
    st.integers(1, 12),
    max_size=6,
)
SPECIALS = st.sampled_from([SPECIAL, ("PAD", "MISS"), ("BOS", "MISS", "X", "PAD")])


def table(vocab):
    """What every id is, by counting through special tokens and modalities."""
    found = dict.fromkeys(range(vocab.vocab_size))
    for place, modality in enumerate(vocab.modalities.values(), start=1):
        for code in range(modality.size):
            found[modality.base + code] = (place, modality.name, code)
    return found


# ------------------------------------------------------------------------------------------ ranges


def test_the_three_modalities_and_others_follow_the_special_tokens():
    vocab = build_vocab_spec(v_image=5, v_scalar=4, v_spectra=3, modalities={"class": 2, "period": 1})
    assert vocab.special == {"PAD": 0, "MISS": 1, "BOS": 2, "EOS": 3, "SEP": 4, "MASK": 5}
    assert [(m.name, m.base, m.size, m.stop) for m in vocab.modalities.values()] == [
        ("image", 6, 5, 11),
        ("scalar", 11, 4, 15),
        ("spectrum", 15, 3, 18),
        ("class", 18, 2, 20),
        ("period", 20, 1, 21),
    ]
    assert (vocab.base_image, vocab.base_scalar, vocab.base_spectrum) == (6, 11, 15)
    assert (vocab.pad_id, vocab.miss_id, vocab.vocab_size, vocab.num_types) == (0, 1, 21, 6)
    assert list(range(21))[vocab.range_of("class").slice] == [18, 19]


def test_pad_and_miss_are_where_the_special_tokens_say():
    vocab = build_vocab_spec(v_scalar=2, special=("MISS", "A", "PAD"))
    assert (vocab.pad_id, vocab.miss_id, vocab.base_scalar) == (2, 0, 3)
    assert vocab.encode("scalar", torch.tensor([-1, 1])).tolist() == [0, 4]


@settings(max_examples=60, deadline=None)
@given(sizes=SIZES, special=SPECIALS, shape=st.sampled_from([(-1,), (1, -1), (-1, 1, 1)]))
def test_any_number_of_modalities(sizes, special, shape):
    vocab = build_vocab_spec(modalities=sizes, special=special)
    assert list(vocab.modalities) == list(sizes)
    assert vocab.vocab_size == len(special) + sum(sizes.values())
    assert vocab.num_types == 1 + len(sizes)
    known = table(vocab)
    assert [token for token, what in known.items() if what is None] == list(range(len(special)))
    ids = torch.arange(vocab.vocab_size).reshape(shape)
    assert vocab.types(ids).flatten().tolist() == [0 if what is None else what[0] for what in known.values()]
    assert vocab.types(ids).shape == ids.shape
    for name, size in sizes.items():
        own = [what[2] if what is not None and what[1] == name else -1 for what in known.values()]
        assert vocab.decode(name, ids).flatten().tolist() == own
        codes = torch.arange(-1, size)
        assert torch.equal(vocab.decode(name, vocab.encode(name, codes)), codes)
        assert vocab.encode(name, codes)[0] == special.index("MISS")


def test_ids_outside_the_vocabulary_belong_to_nothing():
    vocab = build_vocab_spec(v_scalar=3)
    outside = torch.tensor([-100, -1, 9, 10**12])
    assert vocab.types(outside).tolist() == [0] * 4
    assert vocab.decode("scalar", outside).tolist() == [-1] * 4


def test_ranges_by_hand_may_have_gaps_and_come_in_any_order():
    ranges = {"late": Modality("late", 20, 2), "early": Modality("early", 3, 4)}
    vocab = VocabSpec({"PAD": 10, "MISS": 0}, ranges)
    assert list(vocab.modalities) == ["early", "late"]
    assert (vocab.vocab_size, vocab.pad_id) == (22, 10)
    assert vocab.types(torch.tensor([3, 6, 7, 10, 20, 21])).tolist() == [1, 1, 0, 0, 2, 2]
    assert VocabSpec({"PAD": 40, "MISS": 0}, ranges).vocab_size == 41
    assert VocabSpec(PLAIN, {}).vocab_size == 2


def test_a_vocabulary_keeps_its_own_copy_of_what_it_was_given():
    special, ranges = dict(PLAIN), {"a": Modality("a", 2, 3)}
    vocab = VocabSpec(special, ranges)
    special["PAD"] = 9
    ranges.clear()
    assert vocab.pad_id == 0
    assert list(vocab.modalities) == ["a"]
    with pytest.raises(dataclasses.FrozenInstanceError):
        vocab.vocab_size = 3


# ------------------------------------------------------------------------------------------ codes and tokens


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.int64])
def test_all_integers_of_codes_and_tokens(dtype):
    """Ids beyond the type's own range must not wrap around."""
    vocab = build_vocab_spec(v_image=1000, v_scalar=70000)
    codes = torch.tensor([0, 7, 127]).to(dtype)
    assert vocab.encode("scalar", codes).tolist() == [1006, 1013, 1133]
    assert vocab.encode("image", codes).dtype is torch.int64
    tokens = torch.tensor([0, 6, 100]).to(dtype)
    assert vocab.decode("image", tokens).tolist() == [-1, 0, 94]
    assert vocab.decode("scalar", tokens).tolist() == [-1, -1, -1]
    assert vocab.types(tokens).tolist() == [0, 1, 1]


@pytest.mark.parametrize("bad", [[-2], [10], [0, 3, 11], [-1, -5], [10**9]])
def test_codes_out_of_range(bad):
    vocab = build_vocab_spec(v_scalar=10)
    with pytest.raises(DataError, match=r"the modality 'scalar' must be 0 … 9, or -1") as error:
        vocab.encode("scalar", torch.tensor(bad))
    assert str(min(bad) if min(bad) < -1 else max(bad)) in str(error.value)


def test_codes_are_whole_numbers():
    with pytest.raises(DataError, match=r"integers, found torch.float32"):
        build_vocab_spec(v_scalar=10).encode("scalar", torch.tensor([1.0, float("nan")]))


def test_no_codes_at_all():
    vocab = build_vocab_spec(v_scalar=10)
    assert vocab.encode("scalar", torch.zeros(0, 3, dtype=torch.int64)).shape == (0, 3)
    assert vocab.types(torch.zeros(0, dtype=torch.int64)).shape == (0,)


def test_results_stay_on_the_device_and_ask_it_nothing():
    """The meta device has no values: whatever looked at them would fail."""
    vocab = build_vocab_spec(v_image=5, v_scalar=10)
    tokens = torch.zeros(2, 3, dtype=torch.int64, device="meta")
    assert (vocab.types(tokens).device.type, vocab.types(tokens).shape) == ("meta", (2, 3))
    assert vocab.decode("scalar", tokens).device.type == "meta"


@pytest.mark.parametrize("call", ["range_of", "encode", "decode"])
def test_a_modality_that_is_not_there(call):
    arguments = () if call == "range_of" else (torch.tensor([0]),)
    with pytest.raises(ConfigError, match=re.escape("no modality 'spectrum' (there are: image, mass)")):
        getattr(build_vocab_spec(v_image=2, modalities={"mass": 2}), call)("spectrum", *arguments)
    with pytest.raises(ConfigError, match=re.escape("(there are: none)")):
        getattr(build_vocab_spec(), call)("spectrum", *arguments)


@pytest.mark.parametrize("name", ["image", "scalar", "spectrum"])
def test_bases_of_modalities_that_are_not_there(name):
    with pytest.raises(ConfigError, match=f"no modality '{name}'"):
        getattr(build_vocab_spec(modalities={"mass": 2}), f"base_{name}")


# ------------------------------------------------------------------------------------------ mistakes


@pytest.mark.parametrize("size", [0, -1, True, False, 1.5, 3.0, "7", None, float("nan")])
def test_sizes_are_whole_numbers_of_at_least_one(size):
    with pytest.raises(ConfigError, match=r"size of the modality 'a' is .*integer of at least 1"):
        build_vocab_spec(modalities={"a": size})
    with pytest.raises(ConfigError, match=r"size of the modality 'a' is .*integer of at least 1"):
        VocabSpec(PLAIN, {"a": Modality("a", 2, size)})
    if size is not None:
        with pytest.raises(ConfigError, match="size of the modality 'image' is"):
            build_vocab_spec(v_image=size)


@pytest.mark.parametrize("base", [-1, True, 2.0, "2", None])
def test_first_ids_are_whole_numbers(base):
    ranges = {"a": Modality("a", base, 2), "b": Modality("b", 10, 2)}
    with pytest.raises(ConfigError, match=r"first id of 'a' is .*integer of at least 0"):
        VocabSpec(PLAIN, ranges)


@pytest.mark.parametrize("token", [-1, True, 0.0, "0", None, [0]])
def test_ids_of_special_tokens_are_whole_numbers(token):
    with pytest.raises(ConfigError, match=r"id of 'PAD' is .*integer of at least 0"):
        VocabSpec({"PAD": token, "MISS": 1}, {})


@pytest.mark.parametrize(
    ("first", "second"), [((2, 5), (6, 1)), ((2, 5), (2, 5)), ((2, 9), (4, 2)), ((4, 2), (2, 9)), ((6, 1), (2, 5))]
)
def test_ranges_that_overlap(first, second):
    with pytest.raises(ConfigError, match="overlap") as error:
        VocabSpec(PLAIN, {"a": Modality("a", *first), "b": Modality("b", *second)})
    assert "'a'" in str(error.value)
    assert "'b'" in str(error.value)
    assert "\n" not in str(error.value)


def test_neighbours_do_not_overlap():
    vocab = VocabSpec(PLAIN, {"a": Modality("a", 2, 5), "b": Modality("b", 7, 1)})
    assert vocab.vocab_size == 8


def test_a_range_in_a_third_that_lies_between_is_found():
    """Overlap is looked for in the order of the ids, whatever the order they were given in."""
    ranges = {"c": Modality("c", 20, 5), "a": Modality("a", 2, 5), "b": Modality("b", 24, 2)}
    with pytest.raises(ConfigError, match=r"'c' \(20 … 24\) and 'b' \(24 … 25\) overlap"):
        VocabSpec(PLAIN, ranges)


@pytest.mark.parametrize("base", [0, 1])
def test_a_special_token_inside_a_range(base):
    with pytest.raises(ConfigError, match=r"'(PAD|MISS)' .* overlap"):
        VocabSpec(PLAIN, {"a": Modality("a", base, 4)})
    with pytest.raises(ConfigError, match=r"'SEP' .*overlap"):
        VocabSpec({**PLAIN, "SEP": 5}, {"a": Modality("a", 2, 4)})


@pytest.mark.parametrize(
    ("special", "message"),
    [
        (("PAD",), "include MISS; there are PAD"),
        (("MISS", "X"), "include PAD; there are MISS, X"),
        ((), "include PAD and MISS; there are none"),
        (("PAD", "MISS", "X", "X"), "special token 'X' is given twice"),
        (("PAD", "PAD", "MISS"), "special token 'PAD' is given twice"),
        (("PAD", "MISS", 3), "a special token is called 3"),
    ],
)
def test_special_tokens_that_cannot_be(special, message):
    with pytest.raises(ConfigError, match=message):
        build_vocab_spec(v_scalar=3, special=special)


def test_two_special_tokens_of_one_id():
    with pytest.raises(ConfigError, match=r"'MISS' .* and 'X' .* overlap"):
        VocabSpec({"PAD": 0, "MISS": 1, "X": 1}, {})


@pytest.mark.parametrize("name", ["", "1st", "a b", "a.b", "a/b", "-", "-a", "_a", 3, None, "a\n", "loss,"])
def test_names_of_modalities(name):
    with pytest.raises(ConfigError, match=r"a modality is named .*use letters"):
        build_vocab_spec(modalities={name: 3})


def test_names_that_are_taken():
    with pytest.raises(ConfigError, match="'image' is given twice"):
        build_vocab_spec(v_image=3, modalities={"image": 4})
    with pytest.raises(ConfigError, match="'PAD'"):
        build_vocab_spec(modalities={"PAD": 4})
    with pytest.raises(ConfigError, match="'a' or 'b'"):
        VocabSpec(PLAIN, {"a": Modality("b", 2, 3)})


# ------------------------------------------------------------------------------------------ files and copies


@settings(max_examples=30, deadline=None)
@given(sizes=SIZES, special=SPECIALS)
def test_round_trip_through_json(sizes, special, tmp_path_factory):
    vocab = build_vocab_spec(modalities=sizes, special=special)
    assert VocabSpec.from_dict(json.loads(json.dumps(vocab.to_dict()))) == vocab
    path = tmp_path_factory.mktemp("vocab") / "vocab.json"
    vocab.save(path)
    found = VocabSpec.load(str(path))
    assert found == vocab
    assert list(found.modalities) == list(vocab.modalities)
    assert list(found.special) == list(special)


def test_the_dictionary_is_plain_and_its_own():
    vocab = build_vocab_spec(v_scalar=3, special=("PAD", "MISS"))
    data = vocab.to_dict()
    assert data == {"special": PLAIN, "modalities": {"scalar": {"base": 2, "size": 3}}}
    data["special"]["PAD"] = 7
    data["modalities"].clear()
    assert vocab == build_vocab_spec(v_scalar=3, special=("PAD", "MISS"))


def test_vocabularies_that_differ():
    vocab = build_vocab_spec(v_image=3, v_scalar=4)
    assert vocab != build_vocab_spec(v_image=4, v_scalar=3)
    assert vocab != build_vocab_spec(v_image=3, v_spectra=4)
    assert vocab != build_vocab_spec(v_image=3, v_scalar=4, special=("MISS", "PAD", "BOS", "EOS", "SEP", "MASK"))


def test_equal_vocabularies_have_the_same_hash():
    vocab = build_vocab_spec(v_image=3, v_scalar=4)
    turned = VocabSpec(dict(reversed(vocab.special.items())), dict(reversed(vocab.modalities.items())))
    others = [
        build_vocab_spec(v_image=4, v_scalar=3),
        build_vocab_spec(v_image=3, v_scalar=4, special=("PAD", "MISS")),
    ]
    assert turned == vocab
    assert hash(turned) == hash(vocab) == hash(VocabSpec.from_dict(vocab.to_dict()))
    assert len({vocab, turned, *others}) == 3


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda vocab: pickle.loads(pickle.dumps(vocab))])
def test_copies(again):
    vocab = build_vocab_spec(v_image=3, modalities={"class": 4})
    found = again(vocab)
    assert found == vocab
    assert found.vocab_size == 13
    assert found.encode("class", torch.tensor([3, -1])).tolist() == [12, 1]


GOOD = {"special": PLAIN, "modalities": {"a": {"base": 2, "size": 3}, "b": {"base": 5, "size": 3}}}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "is not a vocabulary"),
        (None, "is not a vocabulary"),
        (7, "is not a vocabulary"),
        ("special", "is not a vocabulary"),
        ({}, "is not a vocabulary"),
        ({"special": PLAIN}, "is not a vocabulary"),
        ({"modalities": {}}, "is not a vocabulary"),
        ({**GOOD, "special": 3}, "is not a vocabulary"),
        ({**GOOD, "special": "PAD"}, "is not a vocabulary"),
        ({**GOOD, "special": None}, "is not a vocabulary"),
        ({**GOOD, "modalities": ["a"]}, "is not a vocabulary"),
        ({**GOOD, "modalities": {"a": 3}}, "is not a vocabulary"),
        ({**GOOD, "modalities": {"a": [2, 3]}}, "is not a vocabulary"),
        ({**GOOD, "modalities": {"a": {"base": 2}}}, "is not a vocabulary"),
        ({**GOOD, "special": {"PAD": 0}}, "include MISS"),
        ({**GOOD, "special": {"PAD": 0, "MISS": "1"}}, "'MISS' is '1'"),
        ({**GOOD, "modalities": {**GOOD["modalities"], "c": {"base": "8", "size": 3}}}, "first id .* 'c' is '8'"),
        ({**GOOD, "modalities": {**GOOD["modalities"], "c": {"base": None, "size": 3}}}, "first id .* 'c' is None"),
        ({**GOOD, "modalities": {**GOOD["modalities"], "c": {"base": 8, "size": [1]}}}, "size .* 'c' is"),
        ({**GOOD, "modalities": {**GOOD["modalities"], "c": {"base": 7, "size": 3}}}, "overlap"),
    ],
)
def test_damaged_descriptions(data, message, tmp_path):
    with pytest.raises(ConfigError, match=message) as error:
        VocabSpec.from_dict(data)
    assert "\n" not in str(error.value)
    path = tmp_path / "vocab.json"
    path.write_text(json.dumps(data))
    with pytest.raises(DataError, match=message) as error:
        VocabSpec.load(path)
    assert str(error.value).startswith(f"{path}: ")


@pytest.mark.parametrize("text", ["", "{", '{"special": {"PAD"', "nonsense", "[" * 100_000])
def test_files_that_are_not_json(text, tmp_path):
    path = tmp_path / "vocab.json"
    path.write_text(text)
    with pytest.raises(DataError, match="not JSON"):
        VocabSpec.load(path)


def test_files_that_cannot_be_read(tmp_path):
    path = tmp_path / "vocab.json"
    path.write_bytes(b"\xff\xfe\x00{")
    with pytest.raises(DataError, match="not JSON"):
        VocabSpec.load(path)
    with pytest.raises(DataError, match=r"missing.json cannot be read .*should describe a vocabulary"):
        VocabSpec.load(tmp_path / "missing.json")
    with pytest.raises(DataError, match="cannot be read"):
        VocabSpec.load(tmp_path)


def test_a_vocabulary_that_cannot_be_put_in_its_place_leaves_nothing_behind(tmp_path):
    (tmp_path / "vocab.json").mkdir()
    with pytest.raises(OSError, match="directory"):
        build_vocab_spec(v_image=3).save(tmp_path / "vocab.json")
    assert [path.name for path in tmp_path.iterdir()] == ["vocab.json"]
