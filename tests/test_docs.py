"""Documentation that can be checked is checked."""

import re
from pathlib import Path

import pytest

from asyncrl.config.reference import reference
from asyncrl.config.schema import Config
from asyncrl.config.sources import shipped

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])


def test_configuration_page_is_what_the_schema_says():
    """Rewrite it with `asyncrl config reference > docs/configuration.md`."""
    assert (ROOT / "docs/configuration.md").read_text() == reference()


def test_every_key_has_a_meaning():
    rows = [line for line in reference().splitlines() if line.startswith("| `")]
    assert len(rows) > 60
    assert all(not line.endswith("|  |") for line in rows)


def keys(section=Config, prefix=""):
    for name, field in section.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and hasattr(inner, "model_fields"):
            yield from keys(inner, f"{prefix}{name}.")
        else:
            yield prefix + name


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_pages_name_keys_that_exist_and_leave_nothing_open(page):
    text = page.read_text()
    assert "@@" not in text
    sections = "|".join(Config.model_fields)
    named = set(re.findall(rf"`((?:{sections})\.[a-z_]+(?:\.[a-z_]+)?)[`=:]", text))
    known = set(keys())
    unknown = {k for k in named if k not in known and not any(x.startswith(k + ".") for x in known)}
    assert unknown - {"config.yaml", "buffer.client", "learner.run"} == set()


def test_readme_lists_the_shipped_configurations():
    rows = re.findall(r"^\| `([a-z0-9-]+)` \|", (ROOT / "README.md").read_text(), re.MULTILINE)
    table = set(rows)
    assert table == {name for name in shipped() if "/" not in name}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_between_pages_lead_somewhere(page):
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", page.read_text()):
        assert (page.parent / target).exists(), target
