"""A hook of mkdocs that makes pages of the site out of files that are written for the repository.

Pages that live beside the code, such as CONTRIBUTING.md, are pages of the site, too: their links lead to pages of the
site where those exist, else to the files in the repository. The config reference, one file for searching, becomes a
page for each section of the config.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
PAGES = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md", "examples/README.md": "examples.md"}
REFERENCE = "config-reference.md"
LINK = re.compile(r"\]\((?!\w+:|#)([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages."""
    for source, page in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=with_links(text, source, config.repo_url)))
    for name, text in sections_of_reference()[1].items():
        files.append(File.generated(config, f"config/{name}.md", content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Return the page with links that leave docs/ leading to the repository."""
    if page.file.src_uri == REFERENCE:
        introduction, sections = sections_of_reference()
        summaries = (f"* [`{name}`](config/{name}.md): {text.splitlines()[4]}" for name, text in sections.items())
        return introduction + "\n## Sections\n\n" + "\n".join(summaries) + "\n"
    return with_links(markdown, f"docs/{page.file.src_uri}", config.repo_url)


def sections_of_reference() -> tuple[str, dict[str, str]]:
    """Split the config reference into its introduction and one page for each section, by name."""
    text = (ROOT / "docs" / REFERENCE).read_text(encoding="utf-8")
    introduction, *parts = re.split(r"^## `(\w+)`$", text, flags=re.MULTILINE)
    sections = {name: part.replace("\n### ", "\n## ") for name, part in zip(parts[::2], parts[1::2], strict=True)}
    first = "Look up what a key of `{}` does, its type and its default."
    return introduction, {name: f"# `{name}`\n\n{first.format(name)}{part}" for name, part in sections.items()}


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
