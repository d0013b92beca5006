"""What pages of the docs show that no other test types."""

from pathlib import Path

from support.pages import in_a_users_folder, read_page
from support.tiny_run import Shell


def test_the_config_of_a_run_of_weeks_passes_the_check(tmp_path: Path, shell: Shell) -> None:
    with in_a_users_folder(read_page("long-runs.md"), tmp_path):
        code, said, _ = shell("config", "check", "long.yaml")
    assert (code, "long.yaml: valid: 500000 steps of 1024 sequences of 2048 tokens" in said) == (0, True)
