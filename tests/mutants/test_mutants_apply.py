"""Every mutant still applies: its text is in the code once, what it makes is Python, and its tests exist."""

import re
from pathlib import Path

import pytest

from mutants.mutant import ROOT, SOURCE, DoesNotApply, Mutant
from mutants.tables import MUTANTS, NOT_COUNTED


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_applies_compiles_and_names_tests_that_exist(mutant: Mutant) -> None:
    patched = mutant.patched()
    assert patched != (ROOT / SOURCE / mutant.file).read_text()
    if mutant.file.endswith(".py"):
        compile(patched, mutant.file, "exec")
    for test in mutant.tests:
        file, *names = test.split("::")
        text = (ROOT / "tests" / file).read_text()
        for name in names:
            plain = name.partition("[")[0]
            assert re.search(rf"def {plain}\(", text), f"mutant {mutant.name}: no test {plain} in tests/{file}"


def test_there_are_at_least_forty_each_under_a_name_of_its_own() -> None:
    names = [entry.name for entry in [*MUTANTS, *NOT_COUNTED]]
    assert len(names) == len(set(names))
    assert len(MUTANTS) >= 40


def test_code_that_has_moved_on_is_named(tmp_path: Path) -> None:
    mutant = Mutant("example", "optim/clip.py", "x = 1\n", "x = 2\n", "an example", ("optim/test_clip_gradients.py",))
    with pytest.raises(DoesNotApply, match=r"mutant example no longer applies: no file src/kenotron/optim/clip.py"):
        mutant.patched(tmp_path)
    file = tmp_path / SOURCE / mutant.file
    file.parent.mkdir(parents=True)
    file.write_text("x = 1\nx = 1\n")
    with pytest.raises(DoesNotApply, match="found it 2 times"):
        mutant.patched(tmp_path)
    file.write_text("x = 1\n")
    assert mutant.patched(tmp_path) == "x = 2\n"


def test_a_bug_outside_of_functions_cannot_be_put_into_a_running_process() -> None:
    outside = next(mutant for mutant in MUTANTS if mutant.name == "gradients-not-summed-over-cp")
    with (
        pytest.raises(DoesNotApply, match=r"changes no function of src/kenotron/parallel/mesh.py"),
        outside.in_this_process(),
    ):
        pass
