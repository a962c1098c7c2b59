"""Documents point at files that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted(
    path.relative_to(ROOT)
    for folder in (".", "benchmarks", "docs", "kvquant_hf", "notebooks", "tests")
    for path in (ROOT / folder).glob("*.md" if folder == "." else "**/*.md")
)
LINK = re.compile(r"\]\(([^)\s]+)\)")


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_links_lead_somewhere(document: Path) -> None:
    targets = [target for target in LINK.findall((ROOT / document).read_text(encoding="utf-8")) if "://" not in target]
    paths = [target.split("#")[0] for target in targets]
    absent = [path for path in paths if path and not ((ROOT / document).parent / path).exists()]
    assert not absent


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_links_to_headings_lead_somewhere(document: Path) -> None:
    for target in LINK.findall((ROOT / document).read_text(encoding="utf-8")):
        path, hash_mark, anchor = target.partition("#")
        if "://" in target or not hash_mark:
            continue
        text = ((ROOT / document).parent / path if path else ROOT / document).read_text(encoding="utf-8")
        headings = [heading.strip().lower() for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE)]
        slugs = {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in headings}
        assert anchor in slugs, target
