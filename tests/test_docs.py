"""The documentation that is made from code is up to date, and the README's Python runs."""

import re
import runpy
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_ops_table_is_up_to_date():
    made = runpy.run_path(str(ROOT / "docs" / "make_ops.py"))["text"]()
    assert (ROOT / "docs" / "ops.md").read_text(encoding="utf-8") == made, "run python docs/make_ops.py"


def test_python_of_the_readme_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) >= 3
    scope: dict = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), scope)
