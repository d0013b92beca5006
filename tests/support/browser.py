"""Pages in a real browser, without network."""

import shutil
import subprocess
from pathlib import Path

import pytest


def drawn(page: str, folder: Path, script: str = "") -> str:
    """The elements of the HTML `page` after its scripts, and then `script`, have run. Skips where no Chromium is."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no Chromium here")
    file = folder / "page.html"
    file.write_text(page.replace("</body>", f"<script>{script}</script></body>"), encoding="utf-8")
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}", "--dump-dom"]
    return subprocess.run(
        [chromium, *options, "--virtual-time-budget=2000", file.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    ).stdout
