"""The documentation's code runs: each page's Python blocks, in order, in a fresh interpreter."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)

# Runs the blocks in one namespace. Empty lines before each keep the page's line numbers.
RUNNER = """
import re, sys
path, pattern = sys.argv[1:]
text = open(path, encoding="utf-8").read()
namespace = {"__name__": "__main__"}
for match in re.finditer(pattern, text, re.MULTILINE | re.DOTALL):
  source = chr(10) * text.count(chr(10), 0, match.start(1)) + match[1]
  exec(compile(source, path, "exec"), namespace)
"""


def pages_with_code():
  return [page for page in PAGES if BLOCK.search(page.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("page", pages_with_code(), ids=lambda page: page.name)
def test_the_code_of_a_page_runs(page, tmp_path):
  if page.name == "README.md" or "scipy" in page.read_text(encoding="utf-8"):
    pytest.importorskip("scipy")
  if "import torch" in page.read_text(encoding="utf-8"):
    pytest.importorskip("torch")
  environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
  done = subprocess.run(
    [sys.executable, "-c", RUNNER, str(page), BLOCK.pattern],
    cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300,
  )  # fmt: skip
  assert done.returncode == 0, done.stderr


def test_the_readme_opens_with_the_two_commands():
  first = (ROOT / "README.md").read_text(encoding="utf-8")[:1500]
  assert "make demo" in first
  assert "make test" in first


def test_the_table_of_the_readme_is_what_the_benchmarks_say():
  """`tools/benchmark_table.py` fills the table; a stale one is an error."""
  done = subprocess.run(
    [sys.executable, str(ROOT / "tools" / "benchmark_table.py"), "--check"],
    capture_output=True, text=True, timeout=60,
  )  # fmt: skip
  assert done.returncode == 0, done.stdout + done.stderr
