# SPDX-License-Identifier: Apache-2.0
"""Names the test files nearest to what has changed since the last commit, for `make quick`.

    python tools/changed_tests.py          # prints paths of test files, the nearest first
    python tools/changed_tests.py --cpp    # exit status 0 when C++ has changed, else 1
    python tools/changed_tests.py --jax    # prints the test files that another JAX can break

Git tells the changed files of the work tree, or, where that is clean, of the last commit. The
distance of a test file to a module is the number of imports between them; `cg.tap` in a test counts
as an import of the module that defines it. Files are named until those of a distance no longer fit
into SECONDS, by the times of the last `make python-test` (build/python-tests.xml); what is left out
is counted on stderr. Fixtures count for no import, so conftest.py is near to few.

callgate._jax alone knows JAX's internals. Another JAX can break what imports it: `--jax` names the
tests of it and of each folder of callgate with such a module.
"""

from __future__ import annotations

import ast
import functools
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE, TESTS = ROOT / "python" / "callgate", ROOT / "tests" / "python"
TIMES = ROOT / "build" / "python-tests.xml"
SECONDS = 80.0 * (os.cpu_count() or 2)  # of all workers together
UNKNOWN = 5.0  # seconds of a file that no run has timed
CPP = (".cc", ".h", "CMakeLists.txt", ".cmake", "CMakePresets.json")


def git(*arguments: str) -> list[str]:
  """The lines that git prints."""
  command = ["git", "-C", str(ROOT), *arguments]
  return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def changed() -> list[Path]:
  """Files that differ from the last commit, new ones too; else those of the last commit."""
  names = [
    *git("diff", "--name-only", "HEAD"),
    *git("ls-files", "--others", "--exclude-standard"),
  ]
  names = names or git("diff", "--name-only", "HEAD~1", "HEAD")
  return [ROOT / name for name in names]


def module_file(name: str) -> Path | None:
  """The file of callgate.x.y, or of a module that tests share; None for others' modules."""
  parts = name.split(".")
  if parts[0] == "callgate":
    path = PACKAGE.joinpath(*parts[1:])
  else:
    path = TESTS.joinpath("support", *parts)
  for file in (path.with_suffix(".py"), path / "__init__.py"):
    if file.exists():
      return file
  return None


@functools.cache
def public_names() -> dict[str, Path]:
  """The file that defines each name of `callgate` itself."""
  found: dict[str, Path] = {}
  for node in ast.walk(ast.parse((PACKAGE / "__init__.pyi").read_text(encoding="utf-8"))):
    if isinstance(node, ast.ImportFrom):
      for alias in node.names:
        name = f"{node.module}.{alias.name}"
        file = module_file(name) or module_file(node.module or "")
        if file is not None:
          found[alias.asname or alias.name] = file
  return found


@functools.cache
def imports(file: Path) -> frozenset[Path]:
  """The files of callgate and of the tests that a file imports, lazily or not."""
  found: set[Path | None] = set()
  packages: set[str] = set()  # names under which the file knows callgate itself
  tree = ast.parse(file.read_text(encoding="utf-8"))
  for node in ast.walk(tree):
    if isinstance(node, ast.Import):
      for alias in node.names:
        if alias.name == "callgate":
          packages.add(alias.asname or alias.name)
        else:
          found.add(module_file(alias.name))
    elif isinstance(node, ast.ImportFrom) and node.module:
      for alias in node.names:
        if node.module == "callgate" and alias.name in public_names():
          found.add(public_names()[alias.name])
        else:
          found.add(module_file(f"{node.module}.{alias.name}") or module_file(node.module))
  for node in ast.walk(tree):
    owner = node.value if isinstance(node, ast.Attribute) else None
    if isinstance(node, ast.Attribute) and isinstance(owner, ast.Name) and owner.id in packages:
      found.add(public_names().get(node.attr))
  return frozenset(path for path in found if path is not None and path != file)


def distances(targets: set[Path], tests: list[Path]) -> dict[Path, int]:
  """How many imports lie between each test file and the nearest target; none where no way leads."""
  users: dict[Path, set[Path]] = defaultdict(set)
  files = [*PACKAGE.rglob("*.py"), *TESTS.rglob("*.py")]
  for file in files:
    if file != PACKAGE / "__init__.py":  # it imports everything, and says nothing
      for used in imports(file):
        users[used].add(file)
  found = dict.fromkeys(targets, 0)
  front = list(targets)
  while front:
    following: list[Path] = []
    for file in front:
      for user in users[file] - found.keys():
        found[user] = found[file] + 1
        following.append(user)
    front = following
  return {test: found[test] for test in tests if test in found}


def tests_of_jax(tests: list[Path]) -> list[Path]:
  """The test files of callgate._jax, and of the folders of callgate that import it themselves."""
  folders = {
    file.parent
    for file in PACKAGE.rglob("*.py")
    if any(used.is_relative_to(PACKAGE / "_jax") for used in imports(file))
  }
  named = {
    TESTS.joinpath(*(part.removeprefix("_") for part in folder.relative_to(PACKAGE).parts))
    for folder in folders - {PACKAGE}
  }
  return [test for test in tests if test.parent in named | {TESTS / "jax"}]


def seconds() -> dict[str, float]:
  """How long the tests of each file took, by the file's dotted path."""
  total: dict[str, float] = defaultdict(float)
  if TIMES.exists():
    for case in ElementTree.parse(TIMES).iter("testcase"):
      total[case.get("classname", "")] += float(case.get("time", 0))
  return total


def dotted(test: Path) -> str:
  return ".".join(test.relative_to(ROOT).with_suffix("").parts)


def main(options: list[str]) -> int:
  if options not in ([], ["--cpp"], ["--jax"]):
    print(__doc__, file=sys.stderr)
    return 2
  if options == ["--jax"]:
    named = tests_of_jax(sorted(TESTS.rglob("test_*.py")))
    print(*(test.relative_to(ROOT) for test in named), sep="\n")
    return 0
  files = changed()
  if options:
    return 0 if any(file.name.endswith(CPP) for file in files) else 1
  tests = sorted(TESTS.rglob("test_*.py"))
  targets = {file for file in files if file.suffix == ".py" and file.exists()}
  if any(file.name.endswith(CPP) and file.is_relative_to(ROOT / "src") for file in files):
    targets.add(PACKAGE / "_runtime/lifecycle.py")
  near = distances(targets, tests)
  times, left = seconds(), SECONDS
  order = sorted(near, key=lambda test: (near[test], times.get(dotted(test), UNKNOWN)))
  named = list[Path]()
  for test in order:
    cost = times.get(dotted(test), UNKNOWN)
    if cost <= left and test.name not in ("test_smoke.py", "test_examples.py", "test_docs.py"):
      left -= cost
      named.append(test)
  print(*(test.relative_to(ROOT) for test in named), sep="\n")
  names = ", ".join(str(file.relative_to(ROOT)) for file in files)
  skipped = len(order) - len(named)
  print(f"changed: {names or 'nothing'}: {len(named)} files of tests, {skipped} that use it "
        "are left to make test", file=sys.stderr)  # fmt: skip
  return 0


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
