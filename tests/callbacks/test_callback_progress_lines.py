"""What the progress display draws: frames that fit the terminal, rows that are kept, short and right numbers."""

import io
import math
import re

import pytest
from callback_life import Life
from callback_terminal import picture
from hypothesis import given, strategies as st
from rich.cells import cell_len

from etude.callbacks import ProgressDisplay
from etude.callbacks.progress_lines import (
    MAX_ROWS,
    EpochRow,
    View,
    best_row,
    duration,
    epoch_line,
    keep_rows,
    log_line,
    metric,
    number,
    rate,
)

LANGUAGE = ["tokens_per_s", "mfu", "data_wait", "perplexity", "tokens"]
PERPLEXITIES = ["perplexity", "val_perplexity"]

rows = st.lists(
    st.builds(
        lambda seconds, numbers, speed: EpochRow(0, seconds, numbers | speed),
        st.floats(0, 1e6),
        st.dictionaries(
            st.sampled_from(
                [
                    "loss",
                    "accuracy",
                    "val_loss",
                    "val_accuracy",
                    "val_f1",
                    "a_very_long_name_of_a_loss",
                    *PERPLEXITIES,
                ]
            ),
            st.one_of(st.none(), st.floats(allow_nan=False, allow_infinity=False)),
        ),
        st.dictionaries(st.sampled_from(LANGUAGE[:3]), st.floats(0, 1e12)),
    ),
    max_size=30,
).map(lambda found: [EpochRow(epoch, row.seconds, row.numbers) for epoch, row in enumerate(found)])


@given(
    rows=rows,
    width=st.integers(10, 220),
    height=st.integers(5, 60),
    total=st.one_of(st.none(), st.integers(1, 10**7)),
    step=st.integers(0, 10**7),
    record=st.dictionaries(
        st.sampled_from(["loss", "accuracy", "lr", "grad_norm", "samples_per_s", "skipped", *LANGUAGE]), st.floats()
    ),
    outcome=st.sampled_from(["", "finished", "stopped"]),
)
def test_a_frame_fits_the_terminal(rows, width, height, total, step, record, outcome):
    view = View("name", "cpu", 15, total, total, len(rows), step, step, 1.0, None, record, keep_rows(rows))
    view.outcome = outcome
    lines = picture(view, width, height)
    assert all(len(line) <= width for line in lines)
    assert len(lines) <= max(height, 10)


@pytest.mark.parametrize("width", range(10, 60))
def test_wide_characters_take_two_columns(width):
    view = View("実験" * 10, "größe", note="終了" * 8)
    assert all(cell_len(line) <= width for line in picture(view, width, 30))


def test_names_that_the_stream_cannot_write(tmp_path):
    raw = io.BytesIO()
    display = ProgressDisplay(stream=io.TextIOWrapper(raw, encoding="ascii"))
    info = Life(tmp_path).run_info()
    info.name = "größe"
    display.on_train_begin(info)
    assert raw.getvalue().startswith(b"gr??e  cpu")


@given(rows)
def test_the_last_rows_and_the_best_are_kept(rows):
    kept: list[EpochRow] = []
    for row in rows:
        kept = keep_rows([*kept, row])
        assert len(kept) <= MAX_ROWS + 1
    assert kept[-MAX_ROWS:] == rows[-MAX_ROWS:]
    best = best_row(rows)
    assert best_row(kept) == best
    losses = [row.numbers["val_loss"] for row in rows if row.numbers.get("val_loss") is not None]
    if losses:
        assert best.numbers["val_loss"] == min(losses)


def test_hundreds_of_epochs_show_the_last_ones_and_the_best():
    rows: list[EpochRow] = []
    for epoch in range(500):
        rows = keep_rows([*rows, EpochRow(epoch, 1.0, {"loss": 1.0, "val_loss": abs(epoch - 200.0)})])
    view = View("name", "cpu", 600, 6000, 10, 500, 5000, 5, rows=rows)
    text = "\n".join(picture(view, 80, 50))
    assert re.findall(r"^ +(?:★ )?(\d+) ", text, re.M) == ["201", *map(str, range(491, 501))]


@given(st.floats(0, 1e7))
def test_durations_say_the_time_to_half_a_unit(seconds):
    text = duration(seconds)
    if text.endswith(" s"):
        assert abs(float(text[:-2]) - seconds) <= 0.5
    else:
        parts = [int(part) for part in text.split(":")]
        assert all(part < 60 for part in parts[1:])
        assert abs(sum(part * 60**i for i, part in enumerate(reversed(parts))) - seconds) <= 0.5


@given(st.floats(-1e300, 1e300))
def test_numbers_are_short_and_right(value):
    text = number(value)
    assert len(text) <= 10
    assert math.isclose(float(text), value, rel_tol=6e-3, abs_tol=6e-5)


# --- language models


RECORD = {
    "step": 9, "loss": 3.21, "accuracy": 0.31, "perplexity": 24.78, "lr": 3e-4, "grad_norm": 0.52, "skipped": 0,
    "samples_per_s": 148.0, "tokens_per_s": 151_800.0, "data_wait": 0.003, "mfu": 0.412, "tokens": 12_000_000,
}  # fmt: skip


def language_view(**changes) -> View:
    numbers = {name: RECORD[name] for name in ("loss", "accuracy", "perplexity")}
    numbers |= {"val_loss": 3.1, "val_accuracy": 0.32, "val_perplexity": 22.2}
    row = EpochRow(0, 12.0, numbers | {name: RECORD[name] for name in ("tokens_per_s", "mfu", "data_wait")})
    return View("lm", "cpu", 3, 90, 30, 1, 40, 10, 20.0, 25.0, {**RECORD, **changes}, [row])


def test_a_line_of_a_language_model_shows_perplexity_and_speed():
    line = "epoch 2/3  step 40/90  loss 3.2100  ppl 24.78  lr 3.0e-04  152k tokens/s  mfu 41.2%"
    assert log_line(language_view()) == f"{line}  grad norm 0.5200"
    assert log_line(language_view(data_wait=0.034)) == f"{line}  data wait 3.4%  grad norm 0.5200"
    view = language_view()
    assert epoch_line(view, view.rows[0]) == (
        "epoch 1/3 done in 12 s  loss 3.2100  ppl 24.78  val loss 3.1000  val ppl 22.20  152k tokens/s  (best)"
    )


def test_the_loss_without_smoothing_is_shown_as_perplexity_alone():
    view = language_view(nll=3.2)
    view.rows[0].numbers |= {"nll": 3.2, "val_nll": 3.1}
    assert "nll" not in log_line(view) + epoch_line(view, view.rows[0])
    assert not any("nll" in line for line in picture(view, 120, 30))


def test_the_table_of_a_language_model_has_perplexity_in_the_place_of_accuracy():
    head, row = (line.split() for line in picture(language_view(), 80, 30)[2:4])
    assert head == ["epoch", "train", "loss", "train", "ppl", "val", "loss", "val", "ppl", "tokens/s", "time"]
    assert row == ["★", "1", "3.2100", "24.78", "3.1000", "22.20", "152k", "12", "s"]


@given(st.floats(1e-3, 1e15))
def test_a_rate_is_short_and_close(value):
    text = rate(value)
    unit = {"k": 1e3, "M": 1e6, "G": 1e9}.get(text[-1], 1.0)
    assert len(text) <= 8
    assert float(text.rstrip("kMG")) * unit == pytest.approx(value, rel=0.06, abs=0.0051)


@given(st.floats(0.1, 1e300))
def test_a_perplexity_is_short_and_close(value):
    text = metric("val_perplexity", value)
    assert len(text) <= 9
    assert float(text.replace(",", "")) == pytest.approx(value, rel=0.006)
