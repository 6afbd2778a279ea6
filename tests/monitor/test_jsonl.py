"""Sinks: every line valid, nothing torn, and a full disk that does not end a run."""

import json
import math

import numpy as np
from hypothesis import given, strategies as st

from etude.monitor import JsonlSink
from etude.monitor.jsonl import encode
from forked_python import run_python

numbers = st.one_of(
    st.integers(-(2**53), 2**53), st.floats(), st.floats(width=32).map(np.float32), st.text(max_size=8)
)
records = st.dictionaries(st.text(min_size=1, max_size=8).filter(lambda key: key != "nonfinite"), numbers, max_size=6)


def strict(line: str) -> dict:
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(line, parse_constant=refuse)


@given(records)
def test_every_record_is_one_line_of_strict_json(record):
    line = encode(record)
    assert "\n" not in line
    back = strict(line)
    lost = back.pop("nonfinite", [])
    assert lost == [key for key, value in record.items() if not isinstance(value, str) and not math.isfinite(value)]
    assert back == {key: None if key in lost else value for key, value in record.items()}


def test_a_record_can_be_read_as_soon_as_it_is_written(tmp_path):
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path)
    for step in range(3):
        sink.write({"step": step})
        assert [strict(line)["step"] for line in path.read_text().splitlines()] == list(range(step + 1))
    sink.close()


def test_appending_cuts_the_torn_line_of_a_dead_process(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n' + '{"step": 2, "x": "' + "y" * 10000)
    sink = JsonlSink(path)
    sink.write({"step": 2})
    sink.close()
    assert [strict(line) for line in path.read_text().splitlines()] == [{"step": 1}, {"step": 2}]


def test_an_unwritable_file_warns_once_and_never_raises(tmp_path):
    problems: list[str] = []
    sink = JsonlSink(tmp_path / "absent" / "metrics", problems.append)
    for step in range(5):
        sink.write({"step": step})
    assert len(problems) == 1
    assert "No such file or directory; training continues" in problems[0]
    (tmp_path / "absent").mkdir()  # the disk is back: nothing has been lost
    sink.write({"step": 5})
    sink.close()
    text = (tmp_path / "absent" / "metrics").read_text()
    assert [int("".join(filter(str.isdigit, line))) for line in text.splitlines()] == list(range(6))
    assert len(problems) == 1


FULL_DISK = """
import json, resource, sys
from etude.monitor import JsonlSink
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))  # a file of 1000 bytes is a full disk
problems = []
sinks = [JsonlSink(sys.argv[1], problems.append)]
for step in range(100):
    for sink in sinks:
        sink.write({"step": step, "loss": 1 / 3})
while_full = [open(path).read() for path in sys.argv[1:]]
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
for sink in sinks:
    sink.write({"step": 100, "loss": 1 / 3})
print(json.dumps([problems, while_full]))
"""


def test_full_disk_leaves_whole_lines_and_loses_nothing_when_there_is_room_again(tmp_path):
    paths = [tmp_path / "metrics.jsonl"]
    answer = run_python("-c", FULL_DISK, *paths)
    assert answer.returncode == 0, answer.stderr
    problems, while_full = json.loads(answer.stdout)
    assert len(problems) == 1
    assert all("File too large" in problem for problem in problems)
    for text in while_full:
        assert text.endswith("\n")
        assert 900 < len(text) <= 1000
    assert [strict(line)["step"] for line in while_full[0].splitlines()] == list(range(while_full[0].count("\n")))
    assert [strict(line)["step"] for line in paths[0].read_text().splitlines()] == list(range(101))


def test_events_on_a_full_device_do_not_raise(caplog):
    log = JsonlSink("/dev/full")
    log.write({"kind": "warning"})
    log.write({"kind": "warning"})
    log.close()
    assert [record.message for record in caplog.records] == [
        "cannot write /dev/full: No space left on device; training continues without it"
    ]
