"""Runs clang-tidy on the files of the compile databases in the given build folders.

    python tools/clang_tidy.py BUILD_FOLDER...

Folders without a database are left out. A file is checked once, with the first database that has
it, and not again until it, a header, .clang-tidy or the database changes: results are remembered in
build/clang-tidy. Exit status 1 when clang-tidy finds anything.
"""

import hashlib
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MEMORY = ROOT / "build" / "clang-tidy"
OURS = ("src", "include", "tests", "benchmarks")
# The databases hold g++'s command lines; these are its options that clang doesn't know, its
# precompiled headers, and a warning that its -Wconversion doesn't mean.
EXTRA = [
  "--extra-arg=-Wno-ignored-gch",
  "--extra-arg=-Wno-sign-conversion",
  "--extra-arg=-Wno-unknown-warning-option",
  "--extra-arg=-Wno-ignored-optimization-argument",
  "--extra-arg=-Wno-unused-command-line-argument",
]


def entries(folders: list[Path]) -> dict[Path, tuple[Path, str]]:
  """Each of our source files with the build folder and the command that compile it."""
  found: dict[Path, tuple[Path, str]] = {}
  for folder in folders:
    database = folder / "compile_commands.json"
    if not database.exists():
      continue
    for entry in json.loads(database.read_text()):
      path = Path(entry["file"])
      ours = path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in OURS
      if ours and path.exists():
        found.setdefault(path, (folder, entry["command"]))
  return found


def headers_digest() -> bytes:
  digest = hashlib.sha256((ROOT / ".clang-tidy").read_bytes())
  for folder in OURS:
    for path in sorted((ROOT / folder).rglob("*.h")):
      digest.update(path.read_bytes())
  return digest.digest()


def check(path: Path, folder: Path, key: str) -> tuple[bool, str]:
  """Whether `path` is clean, and what clang-tidy prints about it."""
  done = MEMORY / key
  if done.exists():
    return True, ""
  command = ["clang-tidy", "-p", str(folder), "--quiet", *EXTRA, str(path)]
  result = subprocess.run(command, capture_output=True, text=True, check=False)
  if result.returncode == 0:
    done.touch()
    return True, ""
  return False, result.stdout + result.stderr


def main(argv: list[str]) -> int:
  files = entries([ROOT / arg for arg in argv])
  if not files:
    print("clang-tidy: no compile database in", *argv)
    return 1
  MEMORY.mkdir(parents=True, exist_ok=True)
  shared = headers_digest()

  def run(item: tuple[Path, tuple[Path, str]]) -> tuple[bool, str]:
    path, (folder, command) = item
    key = hashlib.sha256(shared + command.encode() + path.read_bytes()).hexdigest()
    return check(path, folder, key)

  failed = 0
  with ThreadPoolExecutor(os.cpu_count()) as pool:
    for (path, _), (clean, output) in zip(files.items(), pool.map(run, files.items()), strict=True):
      if not clean:
        failed += 1
        print(f"== {path.relative_to(ROOT)}\n{output}", flush=True)
  print(f"clang-tidy: {len(files)} files, {failed} with findings")
  return 1 if failed else 0


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
