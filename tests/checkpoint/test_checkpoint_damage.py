"""Any changed bit, missing byte or missing file is noticed, and an older checkpoint is used instead."""

import json
import logging
import os
from pathlib import Path

import pytest
from checkpoint_helpers import read_filled, write_filled
from hypothesis import given, strategies as st

from etude.checkpoint import newest_intact, read_checkpoint
from etude.checkpoint.folder import read_newest_intact
from etude.checkpoint.store import verify_checkpoint
from etude.core import CheckpointError

FILES = ["manifest.json", "meta.json", "state.json", "model.safetensors", "state.safetensors"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("damage") / "step-00000007"
    write_filled(folder, 7)
    return folder


def assert_noticed(folder: Path, name: str, contents: bytes) -> None:
    """Put `contents` in place of a file, and fail unless that is noticed."""
    good = (folder / name).read_bytes()
    (folder / name).write_bytes(contents)
    try:
        with pytest.raises(CheckpointError) as error:
            verify_checkpoint(folder)
        assert "\n" not in str(error.value)
        with pytest.raises(CheckpointError):
            read_checkpoint(folder)
    finally:
        (folder / name).write_bytes(good)


@given(name=st.sampled_from(FILES[1:]), place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_every_bit_flip_is_noticed(folder: Path, name: str, place: float, bit: int) -> None:
    contents = bytearray((folder / name).read_bytes())
    contents[int(place * len(contents))] ^= 1 << bit
    assert_noticed(folder, name, bytes(contents))


def test_every_bit_flip_of_the_manifest_is_noticed(folder: Path) -> None:
    good = (folder / "manifest.json").read_bytes()
    for position in range(8 * len(good)):
        contents = bytearray(good)
        contents[position // 8] ^= 1 << position % 8
        (folder / "manifest.json").write_bytes(contents)
        with pytest.raises(CheckpointError):
            verify_checkpoint(folder)
    (folder / "manifest.json").write_bytes(good)
    verify_checkpoint(folder)


@given(name=st.sampled_from(FILES), place=st.floats(0, 1, exclude_max=True))
def test_every_truncation_is_noticed(folder: Path, name: str, place: float) -> None:
    contents = (folder / name).read_bytes()
    assert_noticed(folder, name, contents[: int(place * len(contents))])


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("more", [b"\n", b" ", b"\0", b"{}"])
def test_appended_bytes_are_noticed(folder: Path, name: str, more: bytes) -> None:
    assert_noticed(folder, name, (folder / name).read_bytes() + more)


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named(folder: Path, name: str) -> None:
    aside = folder.parent / "aside"
    (folder / name).rename(aside)
    try:
        with pytest.raises(CheckpointError, match=name):
            verify_checkpoint(folder)
    finally:
        aside.rename(folder / name)


@pytest.mark.parametrize("name", FILES)
def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "step-00000007"
    write_filled(folder, 7)
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(CheckpointError, match=f"{name} is not a file"):
        verify_checkpoint(folder)


def test_the_message_names_file_and_checksums(folder: Path) -> None:
    contents = bytearray((folder / "state.safetensors").read_bytes())
    contents[-1] ^= 1
    good = (folder / "state.safetensors").read_bytes()
    (folder / "state.safetensors").write_bytes(contents)
    try:
        with pytest.raises(CheckpointError, match=r"is damaged: state.safetensors has checksum \w+…, expected \w+…"):
            verify_checkpoint(folder)
    finally:
        (folder / "state.safetensors").write_bytes(good)


def test_a_later_format_says_to_update(tmp_path: Path) -> None:
    folder = tmp_path / "step-00000001"
    folder.mkdir()
    (folder / "manifest.json").write_text(json.dumps({"format": 3}))
    with pytest.raises(CheckpointError, match="has format 3, this version of etude reads 2; update etude"):
        read_checkpoint(folder)


def flip(path: Path) -> None:
    contents = bytearray(path.read_bytes())
    contents[len(contents) // 2] ^= 4
    path.write_bytes(contents)


def test_the_newest_intact_one_is_used_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for step in (10, 20, 30, 100_000_000):
        write_filled(tmp_path / f"step-{step:08d}", step)
    path, warnings = newest_intact(tmp_path)
    assert (path.name, warnings) == ("step-100000000", [])
    flip(tmp_path / "step-100000000" / "model.safetensors")
    os.truncate(tmp_path / "step-00000030" / "state.safetensors", 5)
    path, warnings = newest_intact(tmp_path)
    assert path == tmp_path / "step-00000020"
    assert [("step-100000000" in warnings[0]), ("step-00000030" in warnings[1])] == [True, True]
    assert "model.safetensors has checksum" in warnings[0]
    assert "state.safetensors has 5 bytes" in warnings[1]
    assert not caplog.records  # the caller has them
    with caplog.at_level(logging.WARNING, logger="etude.checkpoint"):
        checkpoint = read_newest_intact(tmp_path)
    assert [record.message for record in caplog.records] == warnings
    assert (checkpoint.path, list(checkpoint.warnings)) == (path, warnings)
    assert read_filled(checkpoint.path) == 20


def test_none_intact_lists_what_is_wrong_with_each(tmp_path: Path) -> None:
    for step in (1, 2):
        write_filled(tmp_path / f"step-{step:08d}", step)
    flip(tmp_path / "step-00000001" / "state.json")
    (tmp_path / "step-00000002" / "manifest.json").unlink()
    with pytest.raises(
        CheckpointError, match=r"no checkpoint in .* is intact: .*00000002.*manifest.*00000001.*state.json"
    ):
        newest_intact(tmp_path)


@pytest.mark.parametrize("root", ["nowhere", "empty"])
def test_no_checkpoint_at_all(tmp_path: Path, root: str) -> None:
    (tmp_path / "empty" / "not-a-step").mkdir(parents=True)
    (tmp_path / "empty" / "step-12").write_text("")
    with pytest.raises(CheckpointError, match="there is no checkpoint in"):
        newest_intact(tmp_path / root)
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        read_checkpoint(tmp_path / "nowhere" / "step-00000001")
