"""What pages of the docs show that no other test types."""

from pathlib import Path

import pytest

from kenotron.cli import main
from support.pages import files, read_page


def test_the_config_of_a_run_of_weeks_passes_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in files(read_page("long-runs.md")).items():
        Path(name).write_text(text)
    with pytest.raises(SystemExit, match="0"):
        main(["config", "check", "long.yaml"])
    assert "long.yaml: valid: 500000 steps of 1024 sequences of 2048 tokens" in capsys.readouterr().out
