"""The code on every page runs: fenced python blocks of a page, in order, in one namespace."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^( *)```python\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
FENCE = re.compile(r"^\s*(?:`{3,}|~{3,})(.*)$", re.MULTILINE)
NOT_RUN = {"distributed.md": 3}  # marked py: clusters that the tests have not


def blocks(text: str) -> list[tuple[int, str]]:
    """Line of the first statement, and the code, of each block, also of those inside a list."""
    return [(text.count("\n", 0, match.start(2)), dedent(match.group(2))) for match in BLOCK.finditer(text)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_of_code_is_run_or_said_not_to_be(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    fenced = FENCE.split(text)  # text, language, code, "", text, …
    languages = [said.strip() for said in fenced[1::4]]
    assert set(languages) <= {"python", "py", ""}
    assert languages.count("python") == len(blocks(text))
    assert languages.count("py") == NOT_RUN.get(page.name, 0)
    assert "python" in languages or page.name in ("examples.md", "layers.md", "scaling.md")  # scripts, and tables
    for said, code in zip(languages, fenced[2::4], strict=True):
        assert said or not re.search(r"^\s*(import|from|def|assert) ", code, re.MULTILINE), "code without its language"


def test_blocks_inside_a_list_are_found() -> None:
    [(line, code)] = blocks("- so:\n\n  ```python\n  if 1 + 1 == 3:\n      raise AssertionError\n  ```\n")
    assert (line, code) == (3, "if 1 + 1 == 3:\n    raise AssertionError\n")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_of_the_page_runs(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    namespace: dict[str, object] = {"__name__": "__page__"}
    for line, code in blocks(page.read_text(encoding="utf-8")):
        # Blank lines put the failing line of the page into the traceback.
        exec(compile("\n" * line + code, str(page), "exec"), namespace)


def test_readme_example_is_ten_lines_and_fits() -> None:
    _, code = blocks((ROOT / "README.md").read_text(encoding="utf-8"))[0]
    assert sum(bool(line.strip()) for line in code.splitlines()) == 10
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    cost = float(done.stdout.split()[0])
    assert cost < 1e-2


def test_a_page_with_a_wrong_line_fails(tmp_path: Path) -> None:
    """The runner must not pass everything."""
    page = "text\n\n```python\nassert 1 + 1 == 3\n```\n"
    [(line, code)] = blocks(page)
    assert line == 3
    with pytest.raises(AssertionError):
        exec(code, {})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_to_files_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?://)([^)#]+)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"
