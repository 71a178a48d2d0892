# SPDX-License-Identifier: Apache-2.0
"""The disk cache of compiled kernels.

In the folder `kernels`, a *key* identifies everything known before the compiler runs: source,
flags, compiler, CPU. Its manifest, a JSON file, lists the key's libraries, with their checksums and
those of the user's headers that the compiler read. A changed header gives another library; changing
it back gives the first one. Any number of processes may read and build at once. Readers take no
lock: files appear by renaming, and missing, damaged or outdated ones count as absent. One process
at a time builds a key, under a file lock that its death releases; the next process removes the rest
of a killed one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from callgate._build import files

_OLDER = 7  # older libraries that a key keeps beside the newest


def digest(parts: Any) -> str:
  """Returns a hash of any JSON value."""
  return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def remembered(name: str, make: Callable[[], str]) -> str:
  """Returns a text from the cache, made if it is absent."""
  with contextlib.suppress(OSError, UnicodeDecodeError):
    if known := files.read(files.kept_folder("compilers") / name).decode():
      return known
  made = make()
  with contextlib.suppress(OSError):
    files.write(files.usable_folder("compilers") / name, made.encode())
  return made


# Builds in an empty folder; returns the library there, and the files that it depends on. If it
# raises, nothing is kept.
Make = Callable[[Path], tuple[Path, Iterable[str]]]


def find_or_make(key: str, make: Make) -> Path:
  """Returns the library of a key; see the module."""
  names = ("kernels", key[:2])
  with contextlib.suppress(OSError):
    if found := _find(files.kept_folder(*names), key):
      return found
  with contextlib.ExitStack() as stack:
    try:
      place = files.usable_folder(*names)
      stack.enter_context(files.locked(place / f"{key}.lock"))
    except OSError as error:
      place = files.private_folder(error, *names)
      stack.enter_context(files.locked(place / f"{key}.lock"))
    return _find(place, key) or _make(place, key, make)  # another process may have built it


def _make(folder: Path, key: str, make: Make) -> Path:
  for rest in folder.glob(f"{key}.build-*"):  # left by a killed process
    shutil.rmtree(rest, ignore_errors=True)
  with tempfile.TemporaryDirectory(dir=folder, prefix=f"{key}.build-") as building:
    started = time.time_ns()
    made, read = make(Path(building))
    # No checksum for files that changed while the compiler read them.
    changed = {f: os.stat(f).st_mtime_ns > started or not os.path.isfile(f) for f in read}
    known = {f: "changed" if late else files.checksum(f) for f, late in changed.items()}
    name = f"{key}-{digest(sorted(known.items()))[:16]}.so"
    entry = {"library": name, "checksum": files.checksum(made), "dependencies": known}
    files.move(made, folder / name)
  others = [e for e in _manifest(folder, key) if e["library"] != name]
  for dropped in others[:-_OLDER]:
    with contextlib.suppress(OSError):
      (folder / dropped["library"]).unlink()
  files.write(folder / f"{key}.json", json.dumps([*others[-_OLDER:], entry]).encode())
  return folder / name


def _find(folder: Path, key: str) -> Path | None:
  """Returns the newest intact library of the key with unchanged dependencies; or None."""
  for entry in reversed(_manifest(folder, key)):
    library = folder / entry["library"]
    with contextlib.suppress(OSError):
      unchanged = all(files.checksum(f) == known for f, known in entry["dependencies"].items())
      if unchanged and hashlib.sha256(files.read(library)).hexdigest() == entry["checksum"]:
        return library
  return None


def _manifest(folder: Path, key: str) -> list[dict[str, Any]]:
  try:
    return [
      {"library": e["library"], "checksum": e["checksum"], "dependencies": {**e["dependencies"]}}
      for e in json.loads(files.read(folder / f"{key}.json"))
      if re.fullmatch(rf"{key}-[0-9a-f]+\.so", e["library"])
    ]
  except (OSError, ValueError, TypeError, KeyError, RecursionError):
    return []  # absent or damaged
