"""The documents are complete and say what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvgate.cli import main
from kvgate.cli.reference import reference
from kvgate.core.reason import Reason
from kvgate.settings import described
from kvgate.web import HEADERS

ROOT = Path(__file__).parents[2]


def test_the_reference_is_what_the_code_says() -> None:
    """docs/reference.md is made by `make docs`, and was made since the last change."""
    assert (ROOT / "docs/reference.md").read_text() == reference()


def test_every_setting_reason_and_header_is_in_the_reference() -> None:
    """Nothing that an operator can set or see is left out, and each has a meaning."""
    text = reference()
    for name, _, _, meaning in described():
        assert f"| `{name.removeprefix('tenant.NAME.')}` |" in text
        assert len(meaning) > 10, name
    for reason in Reason:
        assert f"`{reason.label}`" in text
    for header in HEADERS:
        assert f"`{header}`" in text


def test_every_header_that_the_code_sends_is_in_the_table() -> None:
    """A header that is added to an answer is added to the table too, and the table names no others."""
    sources = [*(ROOT / "kvgate/web").glob("*.py"), ROOT / "kvgate/relay.py"]
    code = "".join(path.read_text() for path in sources)
    table = code[code.index("HEADERS: Final = {") : code.index('}\n"""Every header that kvgate itself adds')]
    assert re.findall(r'^    "([a-z-]+)": ', table, re.MULTILINE) == list(HEADERS)
    sent = set(re.findall(r'"((?:x-kvgate|x-request|retry)-[a-z-]+)"', code.replace(table, "")))
    assert sent == set(HEADERS)


@pytest.mark.parametrize(
    "document", ["README.md", "ARCHITECTURE.md", "CHANGELOG.md", "docs/operations.md", "docs/fairness.md"]
)
def test_links_in_documents_lead_somewhere(document: str) -> None:
    """Every relative link names a file that is there."""
    path = ROOT / document
    text = path.read_text()
    links = re.findall(r"\]\((?!http)([^)#]+)", text)
    assert [link for link in links if not (path.parent / link).exists()] == []


def test_the_readmes_commands_are_commands(capsys: pytest.CaptureFixture[str]) -> None:
    """Every command that the README shows is one, and knows every flag that is shown with it."""
    readme = (ROOT / "README.md").read_text()
    shown = {
        command: {
            flag
            for line in readme.splitlines()
            if f"kvgate {command} " in line
            for flag in re.findall(r" (--[a-z][a-z-]+)", line.split(" -- ")[0])
        }
        for command in re.findall(r"^ *kvgate ((?:tenants |keys )?[a-z]+)", readme, re.MULTILINE)
    }
    assert {"serve", "check", "tenants apply", "keys create", "keys revoke"} <= set(shown)
    assert shown["serve"]
    assert shown["tenants apply"] == {"--dry-run", "--owner"}
    for command, flags in shown.items():
        with pytest.raises(SystemExit):
            main([*command.split(), "--help"])
        known = capsys.readouterr().out
        assert [flag for flag in flags if flag not in known] == []


def test_the_makefiles_targets_in_the_readme_exist() -> None:
    """`make WORD` in the README is a target."""
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"`?make ([a-z]+)", (ROOT / "README.md").read_text()):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
