# SPDX-License-Identifier: Apache-2.0
"""The documentation's code runs: each page's Python blocks, in order, in a fresh interpreter."""

import colorsys
import html
import pathlib
import re
import subprocess
import sys

import doc_blocks
import interpreters
import pytest

import callgate as cg
from callgate._build import nvrtc

ROOT = pathlib.Path(__file__).resolve().parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FOUND = {page: doc_blocks.blocks(page.read_text(encoding="utf-8")) for page in PAGES}


def run(page, folder, *options):
  return interpreters.succeed(
    pathlib.Path(doc_blocks.__file__),
    page,
    folder,
    *options,
    cwd=folder,
    environment=interpreters.same_path(),
    timeout=300,
  )


@pytest.mark.parametrize("page", [p for p in PAGES if FOUND[p]], ids=lambda page: page.name)
def test_the_code_of_a_page_runs(page, tmp_path):
  code = "".join(block.code for block in FOUND[page] if not block.gpu)
  if page.name == "README.md" or "scipy" in page.read_text(encoding="utf-8"):
    pytest.importorskip("scipy")
  if "import torch" in code:
    pytest.importorskip("torch")
  run(page, tmp_path)


FOR_GPUS = [p for p in PAGES if any(block.gpu for block in FOUND[p])]


@pytest.mark.parametrize("page", FOR_GPUS, ids=lambda page: page.name)
def test_the_code_of_a_page_for_gpus_lowers_for_cuda_without_one(page, tmp_path):
  try:
    nvrtc.compiler()
  except cg.CompileError as error:
    pytest.skip(str(error).splitlines()[0])
  text = run(page, tmp_path, "--lower")
  skipped = text.count(": skipped, since there is no ")
  everything = sum(block.gpu for block in FOUND[page])
  assert "lowered, calls callgate." in text or skipped == everything


@pytest.mark.gpu
@pytest.mark.parametrize("page", FOR_GPUS, ids=lambda page: page.name)
def test_the_code_of_a_page_runs_on_a_gpu(page, tmp_path):
  print(run(page, tmp_path, "--gpu"))


def test_blocks_for_gpus_are_compiled_and_not_run_without_one(tmp_path):
  page = tmp_path / "page.md"
  page.write_text(
    "```python\nx = 1\n```\n"
    '=== "A tab"\n\n    <!-- gpu: no_such_module -->\n    ```python\n    x = 1 / 0\n    ```\n\n'
    "```python\nassert x == 1\n```\n"
  )
  assert [block.gpu for block in doc_blocks.blocks(page.read_text())] == [False, True, False]
  run(page, tmp_path)
  assert "page.md:8: skipped, since there is no no_such_module" in run(page, tmp_path, "--gpu")
  page.write_text("<!-- gpu -->\n```python\nx = = 1\n```\n")
  with pytest.raises(AssertionError, match="SyntaxError"):
    run(page, tmp_path)


def test_a_blocks_output_is_the_text_that_the_page_shows_below_it(tmp_path):
  page = tmp_path / "page.md"
  shown = "```python\nprint(1 + 1)\n```\n\n<!-- output -->\n```text\n2\n```\n"
  page.write_text(shown)
  run(page, tmp_path)
  page.write_text(shown.replace("text\n2", "text\n3"))
  with pytest.raises(AssertionError, match="the page shows\n3\nthe block prints\n2"):
    run(page, tmp_path)
  run(page, tmp_path, "--write")
  assert page.read_text() == shown


def test_the_readme_opens_with_the_two_commands():
  first = (ROOT / "README.md").read_text(encoding="utf-8")[:1500]
  assert "make demo" in first
  assert "make test" in first


@pytest.mark.parametrize("tool", ["benchmark_table.py", "benchmark_charts.py", "gallery.py"])
def test_pages_that_tools_make_of_results_and_examples_are_fresh(tool):
  """The tools make them with `--write`; a stale one is an error."""
  done = subprocess.run(
    [sys.executable, str(ROOT / "tools" / tool), "--check"],
    capture_output=True, text=True, timeout=60,
  )  # fmt: skip
  assert done.returncode == 0, done.stdout + done.stderr


CHARTS = [*ROOT.glob("docs/assets/chart_*.svg"), *ROOT.glob("docs/gallery/*.svg")]


@pytest.mark.parametrize("chart", CHARTS, ids=lambda chart: chart.stem)
def test_a_chart_is_legible_on_a_phone(chart):
  """At a width of 360 px its text has 12 px or more, on a ground of its own in both schemes."""
  text = chart.read_text(encoding="utf-8")
  width = float(re.search(r'viewBox="0 0 (\d+) ', text)[1])
  (size,) = map(float, re.findall(r"font:(\d+)px", text))
  assert size * 360 / width >= 12
  light, _, dark = text.partition("@media(prefers-color-scheme:dark)")
  for scheme in (light, dark):
    assert re.search(r"text\{fill:#", scheme)
    assert re.search(r"\.ground\{fill:#", scheme)
  for x, anchor, label in re.findall(
    r'<text (?:class="title" )?x="([\d.]+)" y="[\d.]+"(?: text-anchor="(\w+)")?>([^<]*)', text
  ):
    after = {"": 1, "middle": 0.5, "end": 0}[anchor] * 0.58 * size * len(html.unescape(label))
    assert float(x) + after <= width, label


def test_a_diagram_with_small_text_scrolls_on_a_phone():
  """Other pictures shrink to the page's width; site.css names those that don't."""
  style = (ROOT / "docs" / "assets" / "site.css").read_text(encoding="utf-8")
  (narrow,) = re.findall(r"@media screen and \(max-width: 44.9em\) \{\n(.*?)\n\}", style, re.DOTALL)
  parts = {part.strip('/"') for part in re.findall(r"\[src[*$]=(\S+?)\]", narrow)}
  drawings = {*ROOT.glob("docs/*.svg"), *ROOT.glob("docs/assets/*.svg")} - {*CHARTS}
  drawings = {drawing.name for drawing in drawings} - {"logo.svg"}
  assert len(drawings) > 5
  assert not [name for name in drawings if not any(part in name for part in parts)]


def luminance(red, green, blue):
  linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (red, green, blue)]
  return sum(c * weight for c, weight in zip(linear, (0.2126, 0.7152, 0.0722), strict=True))


def test_colors_of_code_are_legible_in_the_dark_scheme():
  """The contrast is that of WCAG, on the theme's ground of code: hsl(232, 15%, 18%)."""
  style = (ROOT / "docs" / "assets" / "site.css").read_text(encoding="utf-8")
  (slate,) = re.findall(r'^\[data-md-color-scheme="slate"\].*?\{\n(.*?)\n\}', style, re.M | re.S)
  ground = luminance(*colorsys.hls_to_rgb(232 / 360, 0.18, 0.15))
  colors = re.findall(r"#(\w\w)(\w\w)(\w\w);", slate)
  assert len(colors) == 3
  for color in colors:
    own = luminance(*(int(part, 16) / 255 for part in color))
    assert (own + 0.05) / (ground + 0.05) >= 4.5, color


def test_a_card_of_the_gallery_leads_to_a_page_with_the_code_in_sight():
  cards = (ROOT / "docs" / "gallery.md").read_text(encoding="utf-8")
  pages = re.findall(r"\*\*\[[^]]*\]\((gallery/\w+\.md)\)\*\*", cards)
  assert sorted(pages) == sorted(f"gallery/{p.name}" for p in (ROOT / "docs/gallery").glob("*.md"))
  for page in pages:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    assert re.search(r'^--8<-- "examples/[\w/]+\.py"$', text, re.MULTILINE), page
    assert "\n## Output\n" in text


def test_the_gallery_draws_what_an_example_computed(tmp_path):
  pytest.importorskip("matplotlib")
  pytest.importorskip("scipy")
  picture = tmp_path / "lambertw.png"
  drawn = interpreters.succeed(
    ROOT / "tools" / "gallery_drawings.py",
    "lambertw",
    picture,
    cwd=tmp_path,
    environment=interpreters.same_path(),
    timeout=300,
  )
  assert "root mean square error" in drawn
  assert picture.read_bytes().startswith(b"\x89PNG")
