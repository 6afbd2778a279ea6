"""Findings in code against readings by hand and by ruff."""

import json
import subprocess
import sys

import pytest
from code_tasks import findings
from code_tasks.findings import Finding, groups_of, run_ruff
from code_tasks.labels import ALL_RULES, MEANING, QUALITY, SECURITY
from code_tasks.samples import multi_hot

from etude.core import DataError

FINDINGS = {
    "asserts": ("def asserts(x):\n    assert x\n", set(), {"assert"}),
    "evaluates": ("def evaluates(x):\n    return eval(x)\n", set(), {"execution"}),
    "defaults": ("def defaults(x=[]):\n    x.append(1)\n", {"bugbear"}, set()),
    "badName": ("def badName(list):\n    print(list)\n", {"naming", "builtins"}, set()),
    "unused": ("def unused(x, y):\n    return x\n", {"unused_arguments"}, set()),
    "private": ("def private(other):\n    return other._secret\n", {"private_access"}, set()),
    "swallows": (
        "def swallows(f):\n    try:\n        f()\n    except Exception:\n        pass\n",
        {"simplify", "exceptions"},
        {"swallowed_error"},
    ),
    "loads": ("def loads(x):\n    import pickle\n    return pickle.loads(x)\n", {"pylint"}, {"unsafe_data"}),
    "draws": ("def draws():\n    import random\n    return random.random()\n", {"pylint"}, {"weak_random"}),
    "formats": ("def formats(x):\n    return '%s' % x\n", {"pyupgrade"}, set()),
    "clean": ("def clean(x):\n    return x + 1\n", set(), set()),
}


@pytest.fixture(scope="module")
def found():
    texts = [text for text, _, _ in FINDINGS.values()]
    return dict(zip(FINDINGS, run_ruff(texts, ALL_RULES), strict=True))


@pytest.mark.parametrize("name", FINDINGS)
def test_findings_make_the_labels_that_the_code_deserves(name, found):
    _, quality, security = FINDINGS[name]
    assert {one for one, hot in zip(QUALITY, multi_hot(found[name], QUALITY), strict=True) if hot} == quality
    assert {one for one, hot in zip(SECURITY, multi_hot(found[name], SECURITY), strict=True) if hot} == security


@pytest.mark.parametrize("name", FINDINGS)
def test_findings_are_those_of_ruff_called_by_hand(name, found):
    command = [
        findings.find_ruff(),
        "check",
        "--isolated",
        "--select",
        ",".join(ALL_RULES),
        "--output-format",
        "json",
    ]
    version = f"py3{min(sys.version_info[1], 13)}"
    command += ["--target-version", version, "--no-cache", "-"]
    text = subprocess.run(command, input=FINDINGS[name][0], capture_output=True, text=True, check=False).stdout
    by_hand = sorted((one["location"]["row"], one["code"]) for one in json.loads(text))
    assert by_hand == [(one.line, one.code) for one in found[name]]


def test_what_ruff_cannot_read_has_no_labels_and_noqa_does_not_count():
    broken, hushed = run_ruff(["def (:\n", "def f(x):\n    assert x  # noqa: S101\n"], ALL_RULES)
    assert broken is None
    assert hushed == [Finding(2, "S101")]
    assert set(multi_hot(None, SECURITY)) == {-100}


def test_every_rule_is_known_to_ruff_and_in_one_group():
    for groups in (QUALITY, SECURITY):
        for name, rules in groups.items():
            for rule in rules:
                assert groups_of(rule if rule[-1].isdigit() else f"{rule}100", groups) == [name]
    assert MEANING.keys() == {*QUALITY, *SECURITY}


def test_a_missing_ruff_is_reported_in_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "ruff", None)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(DataError, match=r"etude\[code\]"):
        run_ruff(["x = 1\n"], ALL_RULES)
