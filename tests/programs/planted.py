# SPDX-License-Identifier: Apache-2.0
"""Runs the search on callgate with a fault in it, for each patch of `planted/`: it has to find it.

python tests/programs/planted.py --seconds 600
python tests/programs/planted.py remat_runs_the_gate_again --seconds 60
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import fcntl
import importlib.util
import json
import multiprocessing
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[1]
PATCHES = HERE / "planted"
BUILT = ROOT / "build" / "planted"  # the tree in which C++ faults are built, one after the other
SOURCES = ("include", "src", "cmake", "python", "CMakeLists.txt", "pyproject.toml")
SOURCES += ("README.md", "LICENSE", "packaging", "tools")


@dataclasses.dataclass(frozen=True)
class Fault:
  name: str
  breaks: str  # what, in a sentence
  unfound: str  # why the programs don't find it; "" if they should
  parts: tuple[str, ...]  # regular expressions, each for one of `Case.places`
  is_cpp: bool

  def concerns(self, case: Any) -> bool:
    """True for a program that has the parts and transformations that the fault is in."""
    places = case.places()
    return all(any(re.search(part, place) for place in places) for part in self.parts)

  @property
  def patch(self) -> pathlib.Path:
    return PATCHES / f"{self.name}.patch"


@dataclasses.dataclass(frozen=True)
class Outcome:
  name: str
  kind: str  # of the finding; "" for none
  drawn: int  # programs, as far as the finding
  programs: int  # of these the ones that were run, as the fault concerns them
  seconds: float
  prefer: int  # see `--prefer`
  said: str


def faults() -> list[Fault]:
  return [_read(path) for path in sorted(PATCHES.glob("*.patch"))]


def _read(path: pathlib.Path) -> Fault:
  lines = path.read_text(encoding="utf-8").splitlines()
  head = [line.removeprefix("# ") for line in lines if line.startswith("# ")]
  options = dict(line.split(": ", 1) for line in head[1:])
  parts = tuple(options.get("in", "").split(", ")) if "in" in options else ()
  is_cpp = not any(line.startswith("+++ b/python/") for line in lines)
  return Fault(path.stem, head[0], options.get("unfound", ""), parts, is_cpp)


def plant(fault: Fault, tree: pathlib.Path, *, back: bool = False, dry: bool = False) -> None:
  """Applies a fault's patch to a tree that has the project's paths.

  Raises:
    SystemExit: it doesn't apply.
  """
  options = ["-p1", "--batch", "--forward", "--silent", "--fuzz=0", "--no-backup-if-mismatch"]
  options += ["--reject-file=-"] + (["--dry-run"] if dry else [])
  if back:
    options = [option for option in options if option != "--forward"] + ["--reverse"]
  done = subprocess.run(
    ["patch", *options, "-i", str(fault.patch)], cwd=tree, capture_output=True, text=True
  )
  if done.returncode:
    raise SystemExit(f"planted: {fault.name}.patch does not apply any more:\n{done.stdout}")


# -- packages with a fault -------------------------------------------------------------------------
def installed() -> pathlib.Path:
  """The package as it is installed, which isn't imported for that."""
  found = importlib.util.find_spec("callgate")
  if found is None or found.origin is None:
    raise SystemExit("planted: expected callgate to be installed: make package")
  return pathlib.Path(found.origin).parent


@contextlib.contextmanager
def package(fault: Fault) -> Iterator[pathlib.Path]:
  """A folder with a package that has the fault, for PYTHONPATH."""
  with tempfile.TemporaryDirectory(prefix="planted-") as folder:
    tree = pathlib.Path(folder)
    shutil.copytree(installed(), tree / "python" / "callgate", ignore=_ignored)
    if fault.is_cpp:
      for module in _built(fault):
        shutil.copy2(module, tree / "python" / "callgate")
      headers = tree / "python" / "callgate" / "include"
      if headers.is_dir():
        (tree / "include").symlink_to(headers)
        plant_headers(fault, tree)
    else:
      plant(fault, tree)
    yield tree / "python"


def _ignored(_: str, names: list[str]) -> list[str]:
  return [name for name in names if name == "__pycache__"]


def plant_headers(fault: Fault, tree: pathlib.Path) -> None:
  """Applies the part of a patch that changes headers, which kernels are compiled with."""
  if "+++ b/include/" in fault.patch.read_text():
    plant(fault, tree)


def _built(fault: Fault) -> Sequence[pathlib.Path]:
  """Builds the module with the fault, by what is left of the build before; gives its files."""
  BUILT.mkdir(parents=True, exist_ok=True)
  with (BUILT / "lock").open("w") as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    tree, made = BUILT / "tree", BUILT / "made" / fault.name
    _copy_sources(tree)
    plant(fault, tree)
    try:
      _build(tree, made)
    finally:
      plant(fault, tree, back=True)
  return list((made / "callgate").glob("_callgate*.so"))


def _copy_sources(tree: pathlib.Path) -> None:
  """Copies what differs alone, so that no more is compiled."""
  for name in SOURCES:
    for source in sorted((ROOT / name).rglob("*")) if (ROOT / name).is_dir() else [ROOT / name]:
      if source.is_dir() or "__pycache__" in source.parts:
        continue
      target = tree / source.relative_to(ROOT)
      content = source.read_bytes()
      if not target.is_file() or target.read_bytes() != content:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
  headers = tree / "build" / "xla-headers"
  if not headers.exists():
    shutil.copytree(ROOT / "build" / "xla-headers", headers)


def _build(tree: pathlib.Path, made: pathlib.Path) -> None:
  environment = {**os.environ, "CMAKE_BUILD_PARALLEL_LEVEL": str(os.cpu_count() or 1)}
  environment.pop("PYTHONPATH", None)
  if shutil.which("ccache"):
    environment["CMAKE_CXX_COMPILER_LAUNCHER"] = "ccache"
  shutil.rmtree(made, ignore_errors=True)
  pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-qq", "install"]
  how = ["--no-compile", "--no-deps", "--no-build-isolation", "-C", f"build-dir={BUILT / 'module'}"]
  done = subprocess.run(
    [*pip, *how, "--target", str(made), str(tree)],
    env=environment,
    capture_output=True,
    text=True,
  )
  if done.returncode:
    raise SystemExit(f"planted: the module does not build:\n{done.stdout}{done.stderr}"[-4000:])


# -- the search ------------------------------------------------------------------------------------
# Functions that draw the parts and transformations whose names hold a word.
DRAWS = {
  "grad": ("grad", "custom"), "remat": ("wrapped",), "vmap": ("vmap",), "map": ("map_",),
  "scan": ("scan",), "stoppable": ("scan",), "bar": ("scan",), "while": ("while_loop",),
  "cond": ("cond",), "shard_map": ("shard_map",), "tap": ("tap",), "dataflow": ("tap",),
  "where": ("tap",), "start": ("started", "call"), "hold": ("objects",), "stop": ("stop",),
  "gate": ("call",), "ordered": ("call",), "whole": ("call",), "static values": ("static_values",),
  "runs a program": ("nested",), "tickets": ("tickets",), "result": ("started",),
  "of two": ("call",), "jit": ("wrapped",), "much": ("much",), "cast of": ("form",),
  "differences": ("ruled",), "other arguments": ("ruled",),
  "check that decides": ("check",), "feed of numbers": ("counted_feed",),
  "tap of lanes": ("lane_tap",), "tap every": ("every_tap",), "handles": ("handles",),
  "kernel": ("kernel",), "broadcast along": ("kernel",), "several places": ("in_order",),
}  # fmt: skip
DRAWS |= dict.fromkeys(("root", "knob", "breakpoint"), ("other",))
DRAWS |= dict.fromkeys(("id_tap", "callback"), ("old_interface",))


def prefer(fault: Fault, times: int) -> None:
  """Has this process draw what concerns the fault so many times as often as the search does."""
  import cases
  from program import DRAWN
  from ways import WAYS

  words = " ".join(fault.parts)
  names = {name for word, draws in DRAWS.items() if word in words for name in draws}
  for kind, draws in DRAWN.items():
    DRAWN[kind] = [one for one in draws for _ in range(times if one.__name__ in names else 1)]
  parts = [part for part in fault.parts if part.startswith("way: ")]
  preferred = [way for way in WAYS if any(re.search(part, f"way: {way}") for part in parts)]
  cases.MORE += preferred * (times - 1)


def look(fault: Fault, seconds: float, seed: int, times: int) -> Outcome:
  """Searches for a program that the fault makes wrong, and that is right without it."""
  import search

  prefer(fault, times)
  drawn, programs = 0, 0
  with package(fault) as folder:
    begin = time.monotonic()
    while (left := seconds - (time.monotonic() - begin)) > 0:
      os.environ["PYTHONPATH"] = str(folder)
      explorer = search.Explorer(left, to_first=True, among=fault.concerns)
      found = explorer.explore(seed)
      drawn, programs = drawn + explorer.drawn, programs + found.programs
      if explorer.wrong_case is None:
        break
      took = time.monotonic() - begin
      os.environ.pop("PYTHONPATH")
      if not search.Explorer(600).is_wrong(explorer.wrong_case):
        (finding,) = found.findings
        return Outcome(fault.name, finding.kind, drawn, programs, took, times, finding.said[:200])
      seed += 1000  # callgate's own fault
      print(f"planted: wrong without {fault.name}, too: {found.findings[0].said}", flush=True)
  return Outcome(fault.name, "", drawn, programs, seconds, times, "")


def table(known: Sequence[Fault], outcomes: dict[str, Outcome]) -> str:
  """The outcomes, as the page of `planted/` has them."""
  have = [outcomes[fault.name] for fault in known if fault.name in outcomes]
  found = [one for one in have if one.kind]
  within = [f"{sum(one.seconds <= n for one in found)} within {n} s" for n in (10, 60, 120, 600)]
  rows = [
    f"{len(found)} of {len(have)} faults are found: {', '.join(within)}.",
    "",
    "| fault | what it breaks | found | preferred | drawn | run | seconds |",
    "|---|---|---|---:|---:|---:|---:|",
  ]
  for fault in known:
    kind, numbers = "not run", " | | |"
    if (one := outcomes.get(fault.name)) is not None:
      kind = one.kind or "**no**" + (f": {fault.unfound}" if fault.unfound else "")
      numbers = f"{one.prefer} | {one.drawn} | {one.programs} | {one.seconds:.0f}"
    rows.append(f"| `{fault.name}` | {fault.breaks} | {kind} | {numbers} |")
  return "\n".join(rows) + "\n"


BEGIN = "<!-- by planted.py -->\n"


def main() -> int:
  parser = argparse.ArgumentParser(prog="planted.py", description=__doc__)
  parser.add_argument("names", nargs="*", help="faults; default: all")
  parser.add_argument("--seconds", type=float, default=120, help="at most, for each fault")
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--jobs", type=int, default=1, help="faults that are looked for at a time")
  more = "how many times as often as in the search what concerns a fault is drawn"
  parser.add_argument("--prefer", type=int, default=1, help=more)
  parser.add_argument("--table", default="", help="a page, of which the end becomes the table")
  parser.add_argument("--outcomes", default="", help="a file of JSON, which keeps those of others")
  options = parser.parse_args()
  known = faults()
  if wrong := set(options.names) - {fault.name for fault in known}:
    parser.error(f"expected the names of patches in {PATCHES}, got {sorted(wrong)}")
  chosen = [fault for fault in known if not options.names or fault.name in options.names]
  for fault in chosen:
    plant(fault, ROOT, dry=True)
  saved = pathlib.Path(options.outcomes) if options.outcomes else None
  outcomes = {}
  if saved is not None and saved.is_file():
    outcomes = {one["name"]: Outcome(**one) for one in json.loads(saved.read_text())}
  context = multiprocessing.get_context("spawn")
  with concurrent.futures.ProcessPoolExecutor(
    options.jobs, mp_context=context, max_tasks_per_child=1
  ) as pool:
    tasks = [
      pool.submit(look, fault, options.seconds, options.seed, options.prefer) for fault in chosen
    ]
    for task in concurrent.futures.as_completed(tasks):
      one = task.result()
      outcomes[one.name] = one
      print(f"planted: {one.name}: {one.kind or 'NOT FOUND'}, {one.programs} programs", flush=True)
      if saved is not None:
        saved.write_text(json.dumps([vars(o) for o in outcomes.values()], indent=1))
  text = table(known, outcomes)
  if options.table:
    page = pathlib.Path(options.table)
    before = page.read_text(encoding="utf-8").partition(BEGIN)[0] if page.is_file() else ""
    page.write_text(before + BEGIN + text, encoding="utf-8")
  print(text)
  unfound = [f.name for f in chosen if not outcomes[f.name].kind and not f.unfound]
  return 1 if unfound else 0


if __name__ == "__main__":
  sys.exit(main())
