"""A hook of mkdocs: pages that live beside the code, such as CONTRIBUTING.md, are pages of the site, too.

Their links lead to pages of the site where those exist, else to the files in the repository.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
PAGES = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md", "examples/README.md": "examples.md"}
LINK = re.compile(r"\]\((?!\w+:|#)([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages."""
    for source, page in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=with_links(text, source, config.repo_url)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """The page, with links that leave docs/ leading to the repository."""
    return with_links(markdown, f"docs/{page.file.src_uri}", config.repo_url)


def with_links(text: str, source: str, repository: str) -> str:
    """`text`, the file `source` of the repository, with links that the site can follow."""

    def link(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), found[1]))
        if target in PAGES:
            return f"]({PAGES[target]}{found[2] or ''})"
        if target.startswith("docs/"):
            return f"]({target.removeprefix('docs/')}{found[2] or ''})"
        kind = "tree" if (ROOT / target).is_dir() else "blob"
        return f"]({repository}/{kind}/main/{target}{found[2] or ''})"

    return LINK.sub(link, text)
