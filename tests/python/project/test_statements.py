# SPDX-License-Identifier: Apache-2.0
"""Texts name what exists: pages and their headings, files, names of the package, make targets."""

import ast
import functools
import importlib
import inspect
import itertools
import pkgutil
import re
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path

import jax
import jax.export
from packaging.requirements import InvalidRequirement, Requirement
from texts import CODE, ROOT, files, prose, words

import callgate as cg
from callgate._runtime import targets

SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
URLS: dict[str, str] = PROJECT["project"]["urls"]
PAGES = files(".md")
TODAY = [page for page in PAGES if page.name != "CHANGELOG.md"]  # which names what there was


def wrong(
  paths: Iterable[Path], find: Callable[[Path], Iterable[object]]
) -> dict[str, list[object]]:
  """The objections of `find`, by file."""
  found = {str(path.relative_to(ROOT)): [*find(path)] for path in paths}
  return {path: problems for path, problems in found.items() if problems}


# --- links -------------------------------------------------------------------------------------
@functools.cache
def anchors(page: Path) -> set[str]:
  """The anchors of a page's headings, on the site and on GitHub alike."""
  headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
  plain = [re.sub(r"\[([^]]*)\]\([^)]*\)|[`*]", r"\1", heading).strip() for heading in headings]
  return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", each).lower()) for each in plain}


def dead_links(page: Path) -> Iterable[str]:
  for link in re.findall(r"\]\(([^)\s]+)\)", SPAN.sub("", prose(page))):
    path, _, anchor = link.partition("#")
    if path.startswith(URLS["Documentation"]):
      name = path.removeprefix(URLS["Documentation"]).strip("/") or "index"
      target = ROOT / "docs" / f"{name}.md"
    elif path.startswith(URLS["Repository"] + "/"):
      inside = re.match(r"/(?:blob|tree)/main/(.*)", path.removeprefix(URLS["Repository"]))
      target = ROOT / (inside[1] if inside else "")
    elif re.match(r"https?://|mailto:", link):
      continue
    else:
      target = (page.parent / path).resolve() if path else page
    if target == ROOT / "docs" / "contributing.md":  # which is that file
      target = ROOT / "CONTRIBUTING.md"
    if not target.exists() or (anchor and anchor not in anchors(target)):
      yield link


def test_links_lead_to_pages_and_headings_that_exist() -> None:
  assert not wrong(PAGES, dead_links)


# --- names -------------------------------------------------------------------------------------
def exists(name: str) -> bool:
  """A dotted name leads to something: a module, an attribute, an annotated field."""
  if name in [*vars(targets).values(), targets.GATE_TARGET + targets.PARTITIONED]:
    return True  # what XLA calls, in a lowered program
  try:
    pkgutil.resolve_name(name)
  except (AttributeError, ImportError):
    parent, _, last = name.rpartition(".")
    return exists(parent) and last in getattr(pkgutil.resolve_name(parent), "__annotations__", {})
  return True


def missing_names(file: Path) -> Iterable[str]:
  for span in SPAN.findall(words(file)):
    match = re.match(r"(?:cg|callgate)((?:\.[A-Za-z_]\w*)+)(?=$|\W)", span)
    if match and not exists("callgate" + match[1]):
      yield span


def test_names_of_the_package_exist() -> None:
  importlib.import_module("callgate.compat.callbacks")
  assert not wrong([*TODAY, *files(".py")], missing_names)


def test_names_within_modules_exist() -> None:
  """`dispatch.remember_effects`: the first part is a module of ours, or a public name."""
  modules = {path.stem for path in (ROOT / "python").rglob("*.py")} | set(cg.__all__)
  modules -= {
    "cupy",
    "numba",
    "torch",
    "triton",
    "tvm_ffi",
    "warp",
  }  # libraries of these names, too
  code = (path.read_text(encoding="utf-8") for path in files(".py", ".h", ".cc"))
  known = {*re.findall(r"\w+", "\n".join(code)), "h", "cc"}

  def missing(page: Path) -> Iterable[str]:
    for span in SPAN.findall(prose(page)):
      match = re.match(r"(\w+)\.(\w+)(?=$|\W)", span)
      if match and match[1] in modules and match[2] not in known:
        yield span

  assert not wrong(TODAY, missing)


# Options of other libraries and the old interfaces, and keywords of a call of `cg.torch`.
OTHER_OPTIONS = {
  "create_graph", "drop_remainder", "env_type", "multiprocessing_context", "num_envs", "partitions",
  "render_mode", "requires_grad", "rng", "start", "streaming",
}  # fmt: skip
OF_JAX = (
  jax.jit, jax.grad, jax.vmap, jax.shard_map, jax.device_put, jax.make_mesh, jax.export.export,
  jax.distributed.initialize, jax.lax.scan,
)  # fmt: skip


def parameters(file: Path) -> Iterable[str]:
  """Names of parameters, and of the fields that become some (`_core/factories.py`)."""
  for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
    if isinstance(node, ast.arg):
      yield node.arg
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
      yield node.target.id


def test_options_that_pages_name_are_parameters() -> None:
  known = {name for file in (ROOT / "python").rglob("*.py") for name in parameters(file)}
  known |= {name for function in OF_JAX for name in inspect.signature(function).parameters}
  option = re.compile(r"(?:^|[(, ])([a-z_]\w*)=(?!=)")

  def missing(page: Path) -> Iterable[str]:
    spans = " ".join(f"({span})" for span in SPAN.findall(prose(page)))
    return set(option.findall(spans)) - known - OTHER_OPTIONS

  assert not wrong([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")], missing)


# --- files, commands ---------------------------------------------------------------------------
SUFFIXES = (".py", ".pyi", ".h", ".cc", ".md", ".txt", ".cmake", ".toml", ".json", ".yml")
BELOW = ("", "python/callgate", "src", "docs", "include", "tests", "tests/python", "tests/cpp")
WHOLE = re.compile(rf"(?<![\w./<-])(?:{'|'.join((*CODE, 'docs'))})/[\w./-]+\w")
OTHERS = ("build/", ".venv", "multiprocess/", "pallas/")  # what the build makes; JAX's own tests


def missing_files(file: Path) -> Iterable[str]:
  text = words(file)
  named = WHOLE.findall(text)
  if file.suffix == ".md":
    named += [span for span in SPAN.findall(text) if re.fullmatch(r"[\w.-]+/[\w./-]+", span)]
  for path in named:
    if Path(path).suffix not in SUFFIXES or path.startswith(OTHERS):
      continue
    if not any((folder / path).exists() for folder in (file.parent, *(ROOT / b for b in BELOW))):
      yield path


def test_files_that_are_named_exist() -> None:
  assert not wrong(files(".md", ".py", ".h", ".cc"), missing_files)


def test_nothing_points_to_numbered_sections_of_the_design() -> None:
  numbered = re.compile(r"[Dd]esign\S*,? section \d+")
  assert not wrong(files(".md", ".py", ".h", ".cc"), lambda file: numbered.findall(words(file)))


def test_make_targets_that_are_named_exist() -> None:
  makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
  known = set(re.findall(r"^([a-z][\w-]*)(?: [\w-]+)*:", makefile, re.MULTILINE))
  command = re.compile(r"(?:`|^)make ([a-z][\w-]*)", re.MULTILINE)
  assert not wrong(PAGES, lambda page: set(command.findall(page.read_text("utf-8"))) - known)


# --- versions ----------------------------------------------------------------------------------
def test_the_pages_of_dependencies_have_the_ranges_of_pyproject() -> None:
  named = PROJECT["project"]["optional-dependencies"] | PROJECT["dependency-groups"]
  needed = [
    *PROJECT["build-system"]["requires"],
    *PROJECT["project"]["dependencies"],
    *itertools.chain(*named.values()),
  ]
  pages = [ROOT / "docs" / name for name in ("dependencies.md", "dependencies_development.md")]
  page = "\n".join(page.read_text(encoding="utf-8") for page in pages)
  said = SPAN.findall(page)  # a range in a sentence, with its name
  for row in re.findall(r"^\|(.*)\|$", page, re.MULTILINE):
    cells, _, span = row.partition("| `")
    if re.match(r"[<>=~]+\d", span):
      for name in re.sub(r"\[[^]]*\]|^.*\|", "", cells.strip().strip("|")).split(","):
        said.append(name.strip() + span.partition("`")[0])
  known = {(each.name, each.specifier) for each in map(_requirement, said) if each}
  for text in needed:
    each = Requirement(text)
    assert each.name == "callgate" or (each.name, each.specifier) in known, text


def _requirement(text: str) -> Requirement | None:
  try:
    return Requirement(text)
  except InvalidRequirement:
    return None
