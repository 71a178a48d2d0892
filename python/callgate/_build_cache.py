"""The cache on disk of compiled kernels.

Below `cache_dir()`, a *key* stands for all that is known before the compiler runs: source, flags,
compiler, CPU. Its manifest, a JSON file, lists the libraries made under the key, each with its
checksum and with the checksums of the files that the compiler read beside the source, the user's
headers; so a header that changes makes another library, and one that changes back finds the first.

Any number of processes may read and build at once. Readers take no lock: manifests and libraries
come into being by renaming, and what is missing, damaged or out of date counts as not there. One
process at a time builds a key, under a file lock that dies with it; what a killed one left behind
is removed by the next.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import hashlib
import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Generator, Iterable
from pathlib import Path
from typing import Any

_KEPT = 8  # libraries of one key
_UNKNOWN = "changed"  # no checksum: a file that changed while the compiler read it


def cache_dir() -> Path:
  """Where compiled kernels are kept: `CALLGATE_CACHE_DIR`, or callgate below the user's caches."""
  given = os.environ.get("CALLGATE_CACHE_DIR")
  if given:
    return Path(given).absolute()
  base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
  return Path(base).absolute() / "callgate"


def digest(parts: Any) -> str:
  """A name for anything that JSON holds."""
  return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def checksum(path: str | os.PathLike[str]) -> str:
  """Of a file's content."""
  with open(path, "rb") as file:
    return hashlib.file_digest(file, "sha256").hexdigest()


def remembered(name: str, make: Callable[[], str]) -> str:
  """A text that is kept in the cache, made where it is not there."""
  path = cache_dir() / "compilers" / name
  with contextlib.suppress(OSError, UnicodeDecodeError):
    if known := path.read_text():
      return known
  made = make()
  with contextlib.suppress(OSError):
    path.parent.mkdir(parents=True, exist_ok=True)
    _write(path, made)
  return made


def find_or_make(key: str, make: Callable[[Path], tuple[Path, Iterable[str], int]]) -> Path:
  """The library of a key.

  Args:
    key: see the module.
    make: builds in an empty folder; returns the library that it made there, the files that it was
      made from and when the compiler started, in nanoseconds of the system's clock. What it raises
      is passed on, and nothing is kept.
  """
  folder = cache_dir() / "kernels" / key[:2]
  found = _find(folder, key)
  if found is not None:
    return found
  with _writable(folder, key) as place:
    found = _find(place, key)  # another process may have made it meanwhile
    return found if found is not None else _make(place, key, make)


def _make(folder: Path, key: str, make: Callable[[Path], tuple[Path, Iterable[str], int]]) -> Path:
  for rest in folder.glob(f"{key}.build-*"):  # of a process that was killed
    shutil.rmtree(rest, ignore_errors=True)
  with tempfile.TemporaryDirectory(dir=folder, prefix=f"{key}.build-") as building:
    made, files, started = make(Path(building))
    dependencies = {file: _checksum_since(file, started) for file in files}
    name = f"{key}-{digest(sorted(dependencies.items()))[:16]}.so"
    entry = {"library": name, "checksum": checksum(made), "dependencies": dependencies}
    os.replace(made, folder / name)
  others = [e for e in _manifest(folder, key) if e["library"] != name]
  for dropped in others[: max(0, len(others) + 1 - _KEPT)]:
    with contextlib.suppress(OSError):
      (folder / dropped["library"]).unlink()
  _write(folder / f"{key}.json", json.dumps([*others[-(_KEPT - 1) :], entry]))
  return folder / name


def _find(folder: Path, key: str) -> Path | None:
  """The newest library of the key that is whole and whose dependencies are as they were."""
  for entry in reversed(_manifest(folder, key)):
    library = folder / entry["library"]
    with contextlib.suppress(OSError):
      unchanged = all(checksum(f) == known for f, known in entry["dependencies"].items())
      if unchanged and checksum(library) == entry["checksum"]:
        return library
  return None


def _manifest(folder: Path, key: str) -> list[dict[str, Any]]:
  try:
    entries = json.loads((folder / f"{key}.json").read_text())
    return [
      {
        "library": os.path.basename(entry["library"]),
        "checksum": str(entry["checksum"]),
        "dependencies": {str(f): str(known) for f, known in entry["dependencies"].items()},
      }
      for entry in entries
    ]
  except (OSError, ValueError, TypeError, KeyError, AttributeError):
    return []


def _checksum_since(file: str, started: int) -> str:
  """The checksum of a file as the compiler saw it, where that is known."""
  return _UNKNOWN if os.stat(file).st_mtime_ns > started else checksum(file)


def _write(path: Path, content: str) -> None:
  """Replaces a file in one step."""
  descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.new-")
  with os.fdopen(descriptor, "w") as file:
    file.write(content)
  os.replace(name, path)


@contextlib.contextmanager
def _writable(folder: Path, key: str) -> Generator[Path]:
  """A folder to build in, locked for the key: this one, or a private one of this process."""
  with contextlib.ExitStack() as stack:
    try:
      stack.enter_context(_locked(folder, key))
      place = folder
    except OSError as error:
      place = _private(str(cache_dir()), error.strerror or str(error)) / key[:2]
      stack.enter_context(_locked(place, key))
    yield place


@contextlib.contextmanager
def _locked(folder: Path, key: str) -> Generator[None]:
  folder.mkdir(parents=True, exist_ok=True)
  with (folder / f"{key}.lock").open("w") as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    yield


@functools.cache
def _private(cache: str, problem: str) -> Path:
  """Where this process keeps its kernels when it can't write to the cache."""
  folder, process = Path(tempfile.mkdtemp(prefix="callgate-")), os.getpid()

  def remove() -> None:
    if os.getpid() == process:  # not a fork's child
      shutil.rmtree(folder, ignore_errors=True)

  atexit.register(remove)
  warnings.warn(
    f"callgate: kernels can't be kept in {cache} ({problem}), so each process compiles its own. "
    "Name a folder that can be written to in the environment variable CALLGATE_CACHE_DIR",
    RuntimeWarning,
    stacklevel=2,
  )
  return folder
