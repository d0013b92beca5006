"""Pages in a real browser, without network."""

import shutil
import subprocess
from pathlib import Path

import pytest


def drawn(page: str, folder: Path, script: str = "") -> str:
    """The elements of the HTML `page` after its scripts, and then `script`, have run. Skips where no Chromium is."""
    file = folder / "page.html"
    file.write_text(page.replace("</body>", f"<script>{script}</script></body>"), encoding="utf-8")
    return drawn_at(file.as_uri(), folder)


def drawn_at(address: str, folder: Path, seconds: float = 2) -> str:
    """The elements of the page at `address` after so many seconds of its own clock, which waits for its requests."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no Chromium here")
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}", "--dump-dom"]
    return subprocess.run(
        [chromium, *options, f"--virtual-time-budget={1000 * seconds:.0f}", address],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    ).stdout
