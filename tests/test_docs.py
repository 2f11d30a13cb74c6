"""The documents say what holds: lengths, links, and the code in them runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target


@pytest.mark.slow
def test_the_code_of_the_environment_page_runs(capsys):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "environment.md").read_text(), re.DOTALL)
    assert len(blocks) == 2
    assert len([line for line in blocks[1].splitlines() if line.strip()]) <= 10
    for block in blocks:
        exec(compile(block, "docs/environment.md", "exec"), {})
    mean, spread = map(float, re.findall(r"-?\d+\.\d+", capsys.readouterr().out))
    assert -500 < mean < 500
    assert spread > 0
