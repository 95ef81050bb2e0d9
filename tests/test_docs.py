"""The documentation that is made from code is up to date, and the Python of the README and of docs runs."""

import re
import runpy

import pytest

from tests import ROOT


def test_ops_table_is_up_to_date():
    made = runpy.run_path(str(ROOT / "docs" / "make_ops.py"))["text"]()
    assert (ROOT / "docs" / "ops.md").read_text(encoding="utf-8") == made, "run python docs/make_ops.py"


@pytest.mark.filterwarnings("ignore:dbrq. .* in float")
@pytest.mark.parametrize(
    "file, blocks", [("README.md", 3), ("docs/control_flow.md", 1), ("docs/onnx.md", 1), ("docs/reports.md", 1)]
)
def test_python_of_the_documentation_runs(file, blocks, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = re.findall(r"```python\n(.*?)```", (ROOT / file).read_text(encoding="utf-8"), re.DOTALL)
    assert len(found) >= blocks
    scope: dict = {}
    for block in found:
        exec(compile(block, file, "exec"), scope)
