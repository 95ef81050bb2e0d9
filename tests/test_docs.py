"""The documentation: what is made from code is up to date, its code runs, its links lead somewhere, the site builds."""

import ast
import inspect
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import dbrq
from dbrq.command_line import main
from tests import ROOT

DOCS = ROOT / "docs"
PAGES = (ROOT / "README.md", *sorted(DOCS.glob("*.md")))
_BLOCK = re.compile(r'^( *)```(\w*)(?: title="(.*?)")?\n(.*?)^ *```$', re.MULTILINE | re.DOTALL)
_NOT_RUN = "not run in the tests: "


@dataclass(frozen=True)
class Block:
    """A block of code of a page: its language, what stands above it on the site, and its lines."""

    language: str
    title: str
    code: str

    @property
    def runs(self) -> bool:
        return self.language in ("python", "sh") and not self.title.startswith(_NOT_RUN)


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def blocks(page: Path) -> list[Block]:
    """Of a page, without the two commands of the README, one of which runs this test."""
    text = re.sub(r"<!-- \w+ command -->\n```sh\n.*?```", "", read(page), flags=re.DOTALL)
    return [Block(language, title, code) for _, language, title, code in _BLOCK.findall(text)]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def in_shell(code: str, folder: Path) -> None:
    """Run lines of a shell, in which ``python`` is that of this process; ``dbrq`` runs here, since starting is slow."""
    lines = code.splitlines()
    if all(line.startswith("dbrq ") for line in lines):
        assert [main(shlex.split(line, comments=True)[1:]) for line in lines] == [0] * len(lines), code
        return
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", f'python() {{ "{sys.executable}" "$@"; }}\n{code}'],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert done.returncode == 0, f"{code}\n{done.stdout}{done.stderr}"


@pytest.mark.filterwarnings("ignore:dbrq. .* in float")
@pytest.mark.parametrize("page", [page for page in PAGES if any(block.runs for block in blocks(page))], ids=name_of)
def test_the_code_of_a_page_runs(page, tmp_path, monkeypatch):
    """Blocks of a page run in order. Those of Python share their names; one that has a file's name is that file too."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    scope: dict = {}
    for block in blocks(page):
        if not block.runs or ("g++" in block.code and shutil.which("g++") is None):
            continue
        if block.language == "sh":
            in_shell(block.code, tmp_path)
            continue
        if block.title.endswith(".py"):
            (tmp_path / block.title).write_text(block.code, encoding="utf-8")
        exec(compile(block.code, name_of(page), "exec"), scope)


def test_all_code_is_of_a_language_that_is_run_or_shown():
    for page in PAGES:
        for block in blocks(page):
            assert block.language in ("python", "sh", "cpp", "json", "text", "mermaid"), f"{page.name}: {block.code}"


def test_little_is_not_run():
    kept = [(page.name, block.title) for page in PAGES for block in blocks(page) if block.title.startswith(_NOT_RUN)]
    assert len(kept) <= 4, kept


def test_ops_table_is_up_to_date():
    made = runpy.run_path(str(DOCS / "make_ops.py"))["text"]()
    assert read(DOCS / "ops.md") == made, "run python docs/make_ops.py"


def test_charts_show_the_numbers_of_the_benchmarks(tmp_path):
    charts = runpy.run_path(str(ROOT / "benchmarks" / "charts.py"))
    charts["draw"](tmp_path)
    drawn, kept = ({path.name: texts(path) for path in folder.glob("*.svg")} for folder in (tmp_path, DOCS / "charts"))
    assert drawn and kept == drawn, "run python benchmarks/charts.py"


def texts(picture: Path) -> list[str]:
    """The words and numbers in an SVG, in order; where they stand may differ from one matplotlib to the next."""
    return re.findall(r"<text[^>]*>([^<]*)</text>", read(picture))


# The reference


def functions() -> list[str]:
    """Public names but for errors, which have nothing to call."""
    public = {name: getattr(dbrq, name) for name in dbrq.__all__}
    return [n for n, value in public.items() if not (inspect.isclass(value) and issubclass(value, Exception))]


@pytest.mark.parametrize("name", functions())
def test_every_public_function_has_an_example_that_runs(name):
    lines = inspect.getdoc(getattr(dbrq, name)).splitlines()
    examples = [line for line in lines if line.lstrip().startswith(">>>") and "+SKIP" not in line]
    assert examples, f"the docstring of dbrq.{name} has no example"


def test_the_reference_has_every_public_name():
    assert set(dbrq.__all__) <= set(re.findall(r"^::: dbrq\.(\w+)$", read(DOCS / "api.md"), re.MULTILINE))


# Troubleshooting


def messages() -> list[str]:
    """The fixed parts of the messages that the docs explain, first cells of tables."""
    text = read(DOCS / "troubleshooting.md") + read(DOCS / "speed.md")
    quoted = re.findall(r"^\| `(.*?)` \|", text, re.MULTILINE)
    return [part.strip() for message in quoted for part in message.split("...") if part.strip()]


def constants(tree: ast.AST) -> str:
    """All the text in a file's strings. Python has joined the pieces that stand side by side."""
    return "\n".join(n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str))


def test_messages_that_the_docs_explain_are_those_of_the_package():
    said = "\n".join(constants(ast.parse(read(path))) for path in (ROOT / "dbrq").rglob("*.py"))
    assert len(messages()) > 40
    assert [message for message in messages() if message not in said] == []


# The site


def test_links_of_the_readme_lead_somewhere():
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"):
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", read(page)):
            assert (ROOT / target).exists(), f"{page.name}: {target}"


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The site, built with warnings as errors: of links and anchors that lead nowhere, too."""
    for package in ("mkdocs", "material", "mkdocstrings"):
        pytest.importorskip(package, reason="needs dbrq[docs]")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder


def test_the_site_builds_without_a_warning(site):
    assert (site / "index.html").exists()
    assert not list(site.rglob("*.py"))


def test_examples_of_the_reference_are_code(site):
    assert "<blockquote" not in read(site / "api" / "index.html"), "what MkDocs takes >>> for: docs/docstrings.py"


def test_the_site_fetches_nothing_from_elsewhere(site):
    fetched = re.compile(r'<(?:script|img|iframe)[^>]*\ssrc="(?:https?:)?//|<link[^>]*\shref="(?:https?:)?//')
    pages = [read(page) for page in site.rglob("*.html")]
    assert not any(map(fetched.search, pages))
    assert not any('class="mermaid"' in page for page in pages), "the theme would fetch a script to draw it"
