"""What the documents show works: configurations load, commands parse, and what they point to is there."""

from __future__ import annotations

import ast
import contextlib
import json
import re
import shlex
import tomllib
from pathlib import Path
from typing import NamedTuple

import pytest

from deploy.alerts import ALERTS, RUNBOOK
from kvgate.cli import parsers
from kvgate.cli.reference import reference
from kvgate.settings import load, load_tenants

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "deploy").glob("*.md")])


class Block(NamedTuple):
    """A fenced block of a document."""

    document: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.document}:{self.line}"


def blocks() -> list[Block]:
    """All of them, without the indentation of a list that they stand in."""
    found = []
    for path in DOCUMENTS:
        inside: tuple[int, str, str] | None = None
        lines: list[str] = []
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            fence = re.fullmatch(r"(\s*)```(\w*)", line)
            if inside is None and fence:
                inside, lines = (number, fence[1], fence[2]), []
            elif inside is not None and fence:
                text = "".join(f"{one.removeprefix(inside[1])}\n" for one in lines)
                found.append(Block(str(path.relative_to(ROOT)), inside[0], inside[2], text))
                inside = None
            elif inside is not None:
                lines.append(line)
        assert inside is None, f"{path}: a block is not closed"
    return found


def of(language: str) -> list[Block]:
    return [block for block in blocks() if block.language == language]


class Command(NamedTuple):
    """A kvgate command that a document shows."""

    where: str
    words: list[str]

    def __str__(self) -> str:
        return f"{self.where} {' '.join(self.words)[:40]}"


def commands() -> list[Command]:
    """Every line of a block that begins with `kvgate`, or runs one somewhere."""
    found = []
    for block in blocks():
        if block.language not in {"", "sh"}:
            continue
        for line in block.text.replace("\\\n", " ").splitlines():
            shown = line.split("   #")[0].split("  #")[0].strip()
            at = re.match(r"(?:.* (?:--|exec gate) )?kvgate (?=[a-z-])", shown)
            if at is None:
                continue
            with contextlib.suppress(ValueError):
                found.append(Command(str(block), shlex.split(shown[at.end() :], comments=True)))
    return found


@pytest.mark.parametrize("block", of("toml"), ids=str)
def test_a_configuration_that_is_shown_loads(block: Block, tmp_path: Path) -> None:
    """By the program's own reader: settings up to the first tenant, tenants from there on."""
    settings, tenants = tmp_path / "kvgate.toml", tmp_path / "tenants.toml"
    found = re.search(r"^\[tenant\.", block.text, re.MULTILINE)
    at = len(block.text) if found is None else found.start()
    settings.write_text(block.text[:at])
    tenants.write_text(block.text[at:])
    assert tomllib.loads(block.text)
    load(settings, {}, {})
    load_tenants(tenants)


@pytest.mark.parametrize("command", commands(), ids=str)
def test_a_command_that_is_shown_is_one(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    """The program's own parser takes it, with every flag and every argument."""
    words = command.words[: command.words.index("--")] if "--" in command.words else command.words
    try:
        options = parsers()[0].parse_args(words)
    except SystemExit:
        pytest.fail(f"{command}: {capsys.readouterr().err}")
    assert callable(options.run)


def test_there_are_commands_and_configurations() -> None:
    """The two tests above look at something."""
    assert {command.words[0] for command in commands()} >= {"serve", "check", "explain", "top", "tenants", "keys"}
    assert {block.document for block in of("toml")} >= {"README.md", "docs/deployment.md", "docs/migration.md"}


@pytest.mark.parametrize("block", of("json"), ids=str)
def test_json_that_is_shown_is_json(block: Block) -> None:
    json.loads(block.text)


def anchors(path: Path) -> set[str]:
    """The headings of a document, as they are linked to."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    """To a file that is there, and to a heading in it."""
    broken = []
    for target in re.findall(r"\]\((?!http)([^)\s]+)\)", path.read_text()):
        name, _, anchor = target.partition("#")
        linked = path.parent / name if name else path
        if not linked.exists() or (anchor and anchor not in anchors(linked)):
            broken.append(target)
    assert broken == []


# -- what a document promises


def test_every_alert_has_its_section_and_every_section_its_alert() -> None:
    """With what it means, where to look and what to do; the alert's annotation leads there."""
    runbook = ROOT / RUNBOOK
    sections = re.split(r"^## ", runbook.read_text(), flags=re.MULTILINE)[1:]
    told = {section.split("\n", 1)[0]: section for section in sections}
    assert set(told) == {alert.name for alert in ALERTS}
    for name, section in told.items():
        for part in ("**Meaning.**", "**Look.**", "**Do.**"):
            assert part in section, f"{name}: {part}"
    for alert in ALERTS:
        link = alert.rule()["annotations"]["runbook"]
        assert link.partition("#")[2] in anchors(runbook)


def test_every_metric_that_a_document_names_is_one() -> None:
    """By the reference, which is made from the code; recordings and what Prometheus appends are not looked for."""
    known = set(re.findall(r"^\| `(kvgate_\w+)` \|", reference(), re.MULTILINE))
    assert known
    for path in DOCUMENTS:
        named = set(re.findall(r"`(kvgate_[a-z_]+)(?:\{[^`]*\})?(?: 1)?`", path.read_text()))
        assert named <= known | {name.removesuffix("_total") for name in known}, path


def test_what_the_runbook_looks_for_in_the_log_is_written_there() -> None:
    """Errors by their own words, and members of a request's line by name."""
    logs = (ROOT / "kvgate/log.py").read_text()
    runbook = (ROOT / RUNBOOK).read_text()
    errors = re.findall(r"log's error `([^`]+)`", " ".join(runbook.split()))
    assert len(errors) == 2
    for words in (*errors, "request_id", "cached_tokens", "prompt_tokens", "used_prompt_tokens", "ended_by_context"):
        assert f'"{words}"' in logs, words
        assert f"`{words}`" in " ".join(runbook.split()), words


def test_the_evidence_that_security_names_is_there() -> None:
    """Every test that docs/security.md names is one."""
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / "docs/security.md").read_text())
    assert len(named) > 20
    for path, name in named:
        tree = ast.parse((ROOT / path).read_text())
        functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
        assert name in functions, f"{path} has no {name}"


def test_commands_of_python_that_are_shown_are_there() -> None:
    """`python -m MODULE` names a module of this repository, or of Python and what is installed beside it."""
    text = "".join(path.read_text() for path in DOCUMENTS)
    for module in set(re.findall(r"python -m ((?:loadtests|deploy|kvgate|tests)[\w.]*)", text)):
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module
