# SPDX-License-Identifier: Apache-2.0
"""Runs clang-tidy on the files of the compile databases in the given build folders.

    python tools/clang_tidy.py [--deep] BUILD_FOLDER...

Folders without a database are left out. Files that the build compiles at once are checked at once.
The analyzer looks at a compilation's main file alone: where it shall look, a unity file's sources
are joined to one file. It takes four fifths of the time with its own limits on paths, which
`--deep` leaves as they are. A file is checked once, with the first database that has it, and not
again until it, a header, .clang-tidy or the database changes: results are remembered in
build/clang-tidy. Exit status 1 when clang-tidy finds anything.
"""

import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MEMORY = ROOT / "build" / "clang-tidy"
OURS = ("src", "include", "tests", "benchmarks", "virtual_gpu/fake_driver", "virtual_gpu/ptx")
# The databases hold g++'s command lines; these are its options that clang doesn't know, its
# precompiled headers, and a warning that its -Wconversion doesn't mean.
EXTRA = [
  "--extra-arg=-Wno-ignored-gch",
  "--extra-arg=-Wno-sign-conversion",
  "--extra-arg=-Wno-unknown-warning-option",
  "--extra-arg=-Wno-ignored-optimization-argument",
  "--extra-arg=-Wno-unused-command-line-argument",
]
# Limits of the analyzer: nodes of each function, and the size of functions that it enters at a
# call.
SHALLOW = [
  f"--extra-arg={word}"
  for limit in ("max-nodes=20000", "max-inlinable-size=20")
  for word in ("-Xclang", "-analyzer-config", "-Xclang", limit)
]


@dataclass(frozen=True)
class Unit:
  """A unit of compilation: a file of ours, or a unity file that includes several."""

  path: Path
  sources: tuple[Path, ...]
  folder: Path
  command: str

  @property
  def analyzed(self) -> bool:
    """The analyzer looks at the library's code, and not at its tests'."""
    return not all(source.is_relative_to(ROOT / "tests" / "cpp") for source in self.sources)

  def __str__(self) -> str:
    return ", ".join(str(source.relative_to(ROOT)) for source in self.sources)


def sources_of(path: Path) -> tuple[Path, ...]:
  """The files of ours that are compiled with `path`; none where it is not one of ours."""
  paths = [path]
  if path.parent.name == "Unity":
    paths = [
      Path(name) for name in re.findall(r'^#include "(.+)"', path.read_text(encoding="utf-8"), re.M)
    ]
  return tuple(p for p in paths if any(p.is_relative_to(ROOT / folder) for folder in OURS))


def units(folders: list[Path]) -> list[Unit]:
  found: list[Unit] = []
  seen: set[Path] = set()
  for folder in folders:
    database = folder / "compile_commands.json"
    if not database.exists():
      continue
    for entry in json.loads(database.read_text()):
      path = Path(entry["file"])
      sources = sources_of(path) if path.exists() else ()
      if not seen.issuperset(sources):
        seen.update(sources)
        found.append(Unit(path, sources, folder, entry["command"]))
  return found


def config_of(unit: Unit) -> Path:
  """The checks for the folder of its sources: a unity file itself lies in the build's."""
  folders = unit.sources[0].parents
  return next(f / ".clang-tidy" for f in folders if (f / ".clang-tidy").exists())


def headers_digest() -> bytes:
  digest = hashlib.sha256((ROOT / ".clang-tidy").read_bytes())
  for folder in OURS:
    for path in sorted((ROOT / folder).rglob(".clang-tidy")):
      digest.update(path.read_bytes())
    for path in sorted((ROOT / folder).rglob("*.h")):
      digest.update(path.read_bytes())
  return digest.digest()


def joined(unit: Unit, name: str) -> tuple[Path, list[str]]:
  """One file of a unit's sources, and for each of its lines where that comes from."""
  file = MEMORY / f"{name}.cc"
  origins = [""]
  with file.open("w") as out:
    for source in unit.sources:
      lines = source.read_text().splitlines(keepends=True)
      out.writelines(lines)
      origins += [f"{source}:{number}" for number in range(1, len(lines) + 1)]
  return file, origins


def check(unit: Unit, shared: bytes, limits: list[str]) -> tuple[bool, str]:
  """True if `unit` is clean, and what clang-tidy prints about it."""
  digest = hashlib.sha256(shared + repr(limits).encode() + unit.command.encode())
  for source in unit.sources:
    digest.update(hashlib.sha256(source.read_bytes()).digest())
  done = MEMORY / digest.hexdigest()
  if done.exists():
    return True, ""
  path, origins = joined(unit, done.name) if unit.analyzed else (unit.path, [])
  # The database's command is for the unity file; without its last words, "-c FILE", for any.
  words = shlex.split(unit.command)
  options = words[1 : words.index("-c")]
  command = ["clang-tidy", "--quiet", *EXTRA, *limits, f"--config-file={config_of(unit)}"]
  command += [str(path), "--", *(f"-iquote{source.parent}" for source in unit.sources), *options]
  result = subprocess.run(command, cwd=unit.folder, capture_output=True, text=True, check=False)
  if unit.analyzed:
    path.unlink()
  if result.returncode == 0:
    done.touch()
    return True, ""
  findings = result.stdout + result.stderr
  if unit.analyzed:
    line = rf"{re.escape(str(path))}:(\d+)"
    findings = re.sub(line, lambda match: origins[int(match[1])], findings)
  return False, findings


def main(argv: list[str]) -> int:
  deep = "--deep" in argv
  todo = units([ROOT / arg for arg in argv if arg != "--deep"])
  if not todo:
    print("clang-tidy: no compile database in", *argv)
    return 1
  MEMORY.mkdir(parents=True, exist_ok=True)
  shared = headers_digest()
  limits = [] if deep else SHALLOW

  failed = 0
  with ThreadPoolExecutor(os.cpu_count()) as pool:
    results = pool.map(lambda unit: check(unit, shared, limits), todo)
    for unit, (clean, output) in zip(todo, results, strict=True):
      if not clean:
        failed += 1
        print(f"== {unit}\n{output}", flush=True)
  files = sum(len(unit.sources) for unit in todo)
  print(f"clang-tidy: {files} files in {len(todo)} compilations, {failed} with findings")
  return 1 if failed else 0


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
