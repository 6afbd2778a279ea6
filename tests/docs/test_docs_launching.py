"""The templates for clusters: their files are read by a parser, and the commands in them exist."""

import ast
import re
import shlex
import subprocess

import pytest
import yaml
from docs_pages import ROOT, Block, parse_etude

FILES = sorted((ROOT / "docs" / "launching").iterdir())
VALUES = {"SLURM_NNODES": "2", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NUM_GPUS_PER_NODE": "8"}
YAML = [path for path in FILES if path.suffix == ".yaml"]


def scripts_of(path):
    """Return the shell scripts of a file."""
    if path.suffix == ".sh":
        return [path.read_text()]
    return [
        text for document in yaml.safe_load_all(path.read_text()) for text in _texts(document) if "etude " in text
    ]


def _texts(value):
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _texts(one)


def test_there_is_one_for_every_cluster():
    names = {path.name for path in FILES}
    guide = (ROOT / "docs" / "guides" / "launching.md").read_text()
    assert names == set(re.findall(r"\(\.\./launching/([\w.-]+)\)", guide))


@pytest.mark.parametrize("path", [path for path in FILES if path.suffix != ".py"], ids=lambda path: path.name)
def test_scripts_are_bash_and_their_commands_exist(path):
    scripts = [script for script in scripts_of(path) if "\n" in script]
    assert scripts
    for script in scripts:
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)
        variables = dict(re.findall(r'^\s*(?:export )?(processes)="([^"]*)"', script, re.MULTILINE))
        more = re.findall(r'processes="\$processes ([^"]*)"', script)
        processes = " ".join(
            [re.search(r'processes="([^$"]|\$(?!processes))*"', script)[0][11:-1], *more] if variables else []
        )
        commands = re.findall(r"\betude ((?:train|resume) .*)$", script, re.MULTILINE)
        assert len(commands) == 2
        for command in commands:
            command = command.split("||")[0].replace("$processes", processes)
            words = [
                re.sub(r"\$\{?(\w+)\}?", lambda name: VALUES.get(name[1], "1"), one) for one in shlex.split(command)
            ]
            parse_etude(Block(path, 1, "bash", (), ""), words)
            assert "$" not in " ".join(words)


@pytest.mark.parametrize("path", YAML, ids=lambda path: path.name)
def test_yaml_has_what_its_tool_asks_for(path):
    for document in yaml.safe_load_all(path.read_text()):
        if path.name.startswith("kubernetes"):
            assert {"apiVersion", "kind", "metadata", "spec"} <= document.keys()
        else:
            assert {"name", "num_nodes", "resources", "run"} <= document.keys()


def test_pods_of_all_machines_find_the_first():
    """The address of the endpoint is made from names that the same file gives."""
    service, job = yaml.safe_load_all((ROOT / "docs/launching/kubernetes-job.yaml").read_text())
    (script,) = job["spec"]["template"]["spec"]["containers"][0]["args"]
    assert f"{job['metadata']['name']}-0.{service['metadata']['name']}:" in script
    assert job["spec"]["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    jobset = yaml.safe_load((ROOT / "docs/launching/kubernetes-jobset.yaml").read_text())
    (made,) = jobset["spec"]["replicatedJobs"]
    (script,) = made["template"]["spec"]["template"]["spec"]["containers"][0]["args"]
    name = jobset["metadata"]["name"]
    assert f"{name}-{made['name']}-0-0.{name}:" in script


def test_ray_calls_functions_that_exist():
    from etude import experiment

    tree = ast.parse((ROOT / "docs/launching/ray_train.py").read_text())
    imports = [one for one in ast.walk(tree) if isinstance(one, ast.ImportFrom) and one.module.startswith("etude")]
    assert [one.module for one in imports] == ["etude.experiment"]
    assert all(hasattr(experiment, name.name) for one in imports for name in one.names)
