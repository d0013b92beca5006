"""Links in README, docs and examples lead to files and headings that exist."""

import re
from pathlib import Path

import pytest

from support.tiny_run import REPOSITORY

PAGES = sorted(
    [*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/*.md"), *REPOSITORY.glob("examples/**/*.md")]
    + [*REPOSITORY.glob("benchmarks/*.md"), *REPOSITORY.glob("experiments/*.md"), REPOSITORY / "tests" / "README.md"]
)
FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")


def prose(page: Path) -> str:
    """The page without its code blocks."""
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and mkdocs make them."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def broken(page: Path) -> list[str]:
    found = []
    for link in LINK.findall(prose(page)):
        if "://" in link or link.startswith(("mailto:", "../../actions/")):  # of the repository's site, wherever it is
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            found.append(link)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    assert broken(page) == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# A `first` heading\n")
    page = tmp_path / "page.md"
    page.write_text("[a](other.md#a-first-heading) [b](other.md#b) [c](gone.md) [d](https://example.org)\n")
    assert broken(page) == ["other.md#b", "gone.md"]


def test_no_page_of_the_site_links_to_the_predecessor_for_what_is_here() -> None:
    for page in (REPOSITORY / "docs").glob("*.md"):
        assert "github.com/korovod/kenotron/" not in page.read_text(encoding="utf-8"), page.name
