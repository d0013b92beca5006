"""What GitHub and coding agents read agrees with the repository: targets of make, versions, packages, questions."""

import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import kenotron
from support.tiny_run import KENOTRON, REPOSITORY, environment

GITHUB = REPOSITORY / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
FOLDERS = ("benchmarks", "examples", "src", "tests")
SCRIPTS = [REPOSITORY / ".ci" / "run", *(path for folder in FOLDERS for path in (REPOSITORY / folder).rglob("*.sh"))]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
TARGETS = set(re.findall(r"^([a-z-]+):", (REPOSITORY / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
TARGETS |= {f".venv/.installed-{extra}" for extra in PROJECT["optional-dependencies"]}
PINNED = re.compile(r"[\w-]+/[\w-]+@(release/)?v\d+")  # release/v1 is a branch, which that action asks for


def read(path: Path) -> Any:
    """A YAML file whose scalars stay text: YAML 1.1, which PyYAML reads, takes the key `on` for true."""
    return yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.BaseLoader)


def shell_lines(job: dict[str, Any]) -> list[str]:
    """What the steps of a job run, once for every entry of its matrix."""
    runs = [step["run"] for step in job["steps"] if "run" in step]
    entries = job.get("strategy", {}).get("matrix", {}).get("include", [{}])
    return [filled_in(run, entry) for entry in entries for run in runs]


def filled_in(shell: str, entry: dict[str, str]) -> str:
    for name, value in entry.items():
        shell = shell.replace(f"${{{{ matrix.{name} }}}}", value)
    return shell


def missing_targets(shell: str) -> list[str]:
    return [target for target in re.findall(r"\bmake ([\w./-]+)", shell) if target not in TARGETS]


def commands(page: str) -> str:
    """What a page has in code: its blocks and spans."""
    blocks = re.findall(r"^```.*?^```", page, re.DOTALL | re.MULTILINE)
    return "\n".join(blocks + re.findall(r"`[^`\n]+`", page))


def syntax_error(shell: str) -> str:
    return subprocess.run(["bash", "-n"], input=shell, capture_output=True, text=True).stderr


@pytest.fixture(params=WORKFLOWS, ids=lambda path: path.name)
def workflow(request: pytest.FixtureRequest) -> dict[str, Any]:
    return read(request.param)


def test_a_workflow_says_when_it_runs_and_may_only_read(workflow: dict[str, Any]) -> None:
    assert {"name", "on", "permissions", "jobs"} <= workflow.keys()
    assert set(workflow["on"]) <= {"push", "pull_request", "schedule", "workflow_dispatch"}
    assert workflow["permissions"] == {"contents": "read"}  # jobs that need more say so


def test_a_job_has_a_machine_a_time_limit_and_steps(workflow: dict[str, Any]) -> None:
    assert workflow["jobs"]
    for name, job in workflow["jobs"].items():
        assert job["runs-on"] == "ubuntu-latest", name
        assert re.fullmatch(r"\d+|\$\{\{ matrix\.minutes \}\}", job["timeout-minutes"]), name
        assert job["steps"], name
        assert all(("uses" in step) != ("run" in step) for step in job["steps"]), name
        assert job.get("needs", name) in workflow["jobs"], name


def test_every_action_is_pinned_to_a_major_version(workflow: dict[str, Any]) -> None:
    actions = [step["uses"] for job in workflow["jobs"].values() for step in job["steps"] if "uses" in step]
    assert actions
    assert [action for action in actions if not PINNED.fullmatch(action)] == []


def test_shell_lines_are_bash_and_their_targets_exist(workflow: dict[str, Any]) -> None:
    """Without expressions, too: GitHub would paste in a branch's name as code."""
    for name, job in workflow["jobs"].items():
        for shell in shell_lines(job):
            assert "${{" not in shell, name
            assert syntax_error(shell) == "", name
            assert missing_targets(shell) == [], name


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_a_script_is_bash_and_its_targets_exist(script: Path) -> None:
    shell = script.read_text(encoding="utf-8")
    assert syntax_error(shell) == ""
    assert missing_targets(shell) == []


def test_contributing_names_every_target_that_a_workflow_runs() -> None:
    jobs = [job for path in WORKFLOWS for job in read(path)["jobs"].values()]
    run = {target for job in jobs for shell in shell_lines(job) for target in re.findall(r"\bmake ([a-z-]+)\b", shell)}
    assert {"test", "docs", "nightly"} <= run
    page = commands((REPOSITORY / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    assert run - {*re.findall(r"\bmake ([a-z-]+)", page)} == set()


def test_a_wrong_target_and_wrong_shell_are_found() -> None:
    job = {"strategy": {"matrix": {"include": [{"target": "slow"}, {"target": "slwo"}]}}}
    job |= {"steps": [{"uses": "actions/checkout@v7"}, {"run": "make ${{ matrix.target }}"}]}
    assert shell_lines(job) == ["make slow", "make slwo"]
    assert missing_targets("make test\nmake .venv/.installed-test && make tset") == ["tset"]
    assert (
        commands("To make a test, run\n```bash\nmake test\n```\nor `make slow`.")
        == "```bash\nmake test\n```\n`make slow`"
    )
    assert "unexpected" in syntax_error("if true; then")
    assert not PINNED.fullmatch("actions/checkout@main")


def test_the_tested_versions_are_those_of_pyproject() -> None:
    matrix = read(GITHUB / "workflows" / "tests.yml")["jobs"]["test"]["strategy"]["matrix"]
    prefix = "Programming Language :: Python :: 3."
    named = ["3." + line.removeprefix(prefix) for line in PROJECT.get("classifiers", []) if line.startswith(prefix)]
    assert matrix["python"] == (named or matrix["python"])
    assert f">={matrix['python'][0]}" == PROJECT["requires-python"]
    assert f"torch>={matrix['torch'][0]}" in PROJECT["dependencies"]
    locked = re.search(
        r"^torch==(\d+\.\d+)\.", (REPOSITORY / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert locked is not None
    assert locked[1] in matrix["torch"]


def test_the_bug_form_asks_for_what_contributing_lists() -> None:
    text = (REPOSITORY / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = text.split("## Reporting a bug", 1)[1].split("\n## ", 1)[0]
    asked = (GITHUB / "ISSUE_TEMPLATE" / "bug.yml").read_text(encoding="utf-8")
    listed = re.findall(r"`[^`]+`", section)
    assert "`--debug`" in listed
    assert [name for name in listed if name not in asked] == []


def test_the_citation_is_complete_and_of_this_version() -> None:
    citation = read(REPOSITORY / "CITATION.cff")
    assert citation["cff-version"] == "1.2.0"
    assert citation["message"]
    assert citation["title"]
    assert all({"name", "family-names"} & author.keys() for author in citation["authors"])
    assert citation["license"] == PROJECT["license"]
    assert citation["version"] == re.sub(r"\.dev\d+$", "", kenotron.__version__)


def test_agents_find_every_package_and_every_contract() -> None:
    page = (REPOSITORY / "AGENTS.md").read_text(encoding="utf-8")
    architecture = (REPOSITORY / "docs" / "architecture.md").read_text(encoding="utf-8")
    packages = re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)
    folders = {path.parent.name for path in (REPOSITORY / "src" / "kenotron").glob("*/__init__.py")}
    assert len(page.splitlines()) <= 80
    assert set(packages) == folders
    assert packages == re.findall(r"^\| `(\w+)` \|", architecture.split("## How a run flows")[0], re.MULTILINE)
    contract = re.compile(r"^\d\. \*\*(.+?)\.?\*\*", re.MULTILINE)
    assert contract.findall(page) == contract.findall(architecture)


# ---- the release: the steps that need no network. Not run here: building, installing the wheel, the uploads.


def run_step(job: str, name: str, folder: Path, programs: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """The shell lines of a step of release.yml whose name or command begins with `name`, as GitHub's bash runs them."""
    steps = read(GITHUB / "workflows" / "release.yml")["jobs"][job]["steps"]
    (shell,) = [step["run"] for step in steps if step.get("name", step.get("run", "")).startswith(name)]
    programs.mkdir()
    for program, words in {"python": [sys.executable], "kenotron": KENOTRON}.items():
        (programs / program).write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
        (programs / program).chmod(0o755)
    found = environment(folder, PATH=f"{programs}{os.pathsep}{os.environ['PATH']}", HF_HUB_OFFLINE="1", **variables)
    return subprocess.run(["bash", "-e", "-c", shell], cwd=folder, env=found, capture_output=True, text=True)


@pytest.mark.parametrize(("tag", "code"), [(f"v{kenotron.__version__}", 0), ("v0.0.0", 1)])
def test_a_release_is_of_the_version_that_its_tag_names(tag: str, code: int, tmp_path: Path) -> None:
    done = run_step("build", "Compare the tag", REPOSITORY, tmp_path / "programs", GITHUB_REF_NAME=tag)
    assert done.returncode == code, done.stderr
    file = re.search(r"the version in (\S+)", done.stderr)
    assert code == 0 or (file is not None and kenotron.__version__ in (REPOSITORY / file[1]).read_text())


@pytest.mark.parametrize(("date", "code"), [("2027-01-31", 0), ("unreleased", 1)])
def test_a_release_page_has_the_changelog_of_its_version(date: str, code: int, tmp_path: Path) -> None:
    text = (REPOSITORY / "CHANGELOG.md").read_text(encoding="utf-8")
    heading = re.compile(r"^## \[(.+)\] - .+$", re.MULTILINE)
    newest = heading.search(text)
    assert newest is not None
    version, part = newest[1], heading.split(text)[2]
    (tmp_path / "CHANGELOG.md").write_text(heading.sub(rf"## [\1] - {date}", text, count=1), encoding="utf-8")
    variables = {"GITHUB_REF_NAME": f"v{version}", "GITHUB_REPOSITORY": "korovod/kenotron"}
    done = run_step("build", "Take the version", tmp_path, tmp_path / "programs", **variables)
    assert done.returncode == code, done.stderr
    if code:
        assert f"no heading '## [{version}] - YEAR-MONTH-DAY'" in done.stderr
        return
    notes = (tmp_path / "notes.md").read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)]+)\)", notes)
    assert links
    assert [link for link in links if not link.startswith("https://")] == []
    repository = f"https://github.com/korovod/kenotron/blob/v{version}/"
    assert notes.replace(f"]({repository}", "](").strip() == part.strip()


@pytest.mark.slow
def test_what_a_release_tries_works(tmp_path: Path) -> None:
    """With this checkout in the place of the wheel."""
    assert run_step("try", "kenotron --help", tmp_path, tmp_path / "help").returncode == 0
    done = run_step("try", "Train the starter", tmp_path, tmp_path / "programs")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step 4/4 | loss" in done.stdout + done.stderr
    assert (tmp_path / "checkpoints" / "text-folder" / "latest.txt").read_text().strip() == "4"
    assert "Once upon a time" in done.stdout
