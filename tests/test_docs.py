"""The docs name what exists: every key, verb, problem, backend, extra and status, in the help and in the README."""

import re
import tomllib
from pathlib import Path

import pytest

from kerneldyno.console.usage import usage
from kerneldyno.core import Status
from kerneldyno.keys import INFO
from kerneldyno.keys import VERBS
from kerneldyno.plan import Options
from kerneldyno.registry import Registry


ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
HELP = usage(Registry())


@pytest.mark.parametrize("key", INFO)
def test_every_key_is_documented(key: str) -> None:
    assert f"`{key}=`" in README
    assert re.search(rf"^  {key}=\s", HELP, re.MULTILINE)


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_is_documented(verb: str) -> None:
    assert f"`{verb}`" in README
    assert re.search(rf"^  {verb}\s", HELP, re.MULTILINE)


@pytest.mark.parametrize("name", [*Registry().problems(), *Registry().backends()])
def test_every_problem_and_backend_is_documented(name: str) -> None:
    assert f"`{name}`" in README
    assert re.search(rf"^(Problems|Backends): .*\b{name}\b", HELP, re.MULTILINE)


def test_keys_in_the_readme_exist() -> None:
    named = set(re.findall(r"`([a-z_]+)=`", README))
    assert named == set(INFO)


def test_every_extra_is_documented() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for extra in project["optional-dependencies"]:
        assert f"`{extra}`" in README


def test_statuses_in_the_readme_exist() -> None:
    named = set(re.findall(r"`([a-z]+_[a-z_]+)`", README.split("Every failure is a result")[1].split("rows in")[0]))
    assert named <= set(map(str, Status))
    assert len(named) >= 7


def test_defaults_in_the_help_are_those_of_the_options() -> None:
    options = Options()
    for key, value in (("sampler", options.sampler), ("top", options.top), ("seed", options.seed), ("db", options.db)):
        entry = re.search(rf"^  {key}=.*?(?=^  \S)", HELP, re.MULTILINE | re.DOTALL)
        assert entry is not None
        assert f"default {value}" in entry.group()


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "DESIGN.md", "CHANGELOG.md"])
def test_links_lead_somewhere(name: str) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", (ROOT / name).read_text()):
        assert (ROOT / target).exists(), f"{name} links to {target}"
