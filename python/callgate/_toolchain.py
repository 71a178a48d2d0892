"""The system's C++ compiler, and a cache on disk of what it has made.

An entry is a shared library under the hash of all that it depends on: source, flags, the compiler's
version, callgate's, the CPU. Any number of processes may build and read at once: an entry is
written under a lock, by renaming, with a checksum beside it; one that is damaged is built again.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Generator, Sequence
from pathlib import Path

from callgate import _callgate
from callgate.errors import GateError

DEFAULT_FLAGS = ("-O3", "-march=native", "-DNDEBUG")
DEBUG_FLAGS = ("-O0", "-g", "-DCALLGATE_BOUNDS_CHECK=1")
_ALWAYS = ("-std=c++20", "-shared", "-fPIC", "-fvisibility=hidden")
_COMPILERS = ("c++", "g++", "clang++")
_lock = threading.Lock()
_loaded: dict[str, ctypes.CDLL] = {}


class CompileError(GateError, ValueError):
  """The C++ compiler refused a kernel's source, or there is no compiler.

  Attributes:
    output: what the compiler printed; line numbers are those of the source given.
  """

  def __init__(self, message: str, output: str = "") -> None:
    super().__init__(message)
    self.output = output


def cache_dir() -> Path:
  """Where compiled kernels are kept: `CALLGATE_CACHE_DIR`, or callgate below the user's caches."""
  given = os.environ.get("CALLGATE_CACHE_DIR")
  if given:
    return Path(given)
  base = os.environ.get("XDG_CACHE_HOME")
  return (Path(base) if base else Path.home() / ".cache") / "callgate"


def include_dir() -> Path:
  """The folder that holds `callgate/kernel.h`."""
  installed = Path(__file__).parent / "include"
  if installed.exists():
    return installed
  return Path(__file__).parents[2] / "include"  # a source tree


def compiler() -> str:
  """The C++ compiler's path: `CXX`, then c++, g++, clang++."""
  given = os.environ.get("CXX")
  for name in (given,) if given else _COMPILERS:
    found = shutil.which(name)
    if found:
      return found
  looked = f"CXX={given}" if given else ", ".join(_COMPILERS)
  raise CompileError(
    f"no C++ compiler was found (looked for {looked}). Kernels in C++ need one that knows C++20: "
    "install g++ 12 or newer (Debian, Ubuntu: apt install g++; Fedora: dnf install gcc-c++; conda: "
    "conda install gxx) or clang++ 15 or newer, or name yours in the environment variable CXX"
  )


@functools.cache
def _version(path: str, stamp: tuple[float, int]) -> str:
  del stamp
  result = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
  return result.stdout


@functools.cache
def cpu() -> str:
  """What `-march=native` stands for on this machine."""
  with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
    fields = {
      key.strip(): value.strip()
      for key, _, value in (line.partition(":") for line in file)
      if key.strip() in ("model name", "flags", "Features", "CPU part")
    }
    return f"{platform.machine()} {sorted(fields.items())}"
  return f"{platform.machine()} {platform.processor()}"


@functools.cache
def _headers() -> str:
  digest = hashlib.sha256()
  for name in ("kernel.h", "kernel_abi.h", "elementwise.h", "elementwise_body.h"):
    digest.update((include_dir() / "callgate" / name).read_bytes())
  return digest.hexdigest()


def build(
  what: str,
  source: str,
  *,
  flags: Sequence[str] = (),
  include_dirs: Sequence[str | os.PathLike[str]] = (),
  libraries: Sequence[str] = (),
  library_dirs: Sequence[str | os.PathLike[str]] = (),
) -> Path:
  """The shared library of a C++ source, from the cache where it is there.

  Args:
    what: the kernel, for messages: "kernel 'saxpy'".
    source: C++; what the compiler says of it uses the lines of its `#line` directives.
    flags: after callgate's own.
    include_dirs: folders of headers.
    libraries: names for `-l`, or paths.
    library_dirs: folders for `-L` and for the library's run path.

  Raises:
    CompileError: the compiler refuses it.
  """
  arguments = [
    *_ALWAYS,
    f"-I{include_dir()}",
    *(f"-I{os.fspath(d)}" for d in include_dirs),
    *flags,
  ]
  links = [f"-L{os.fspath(d)}" for d in library_dirs]
  links += [f"-Wl,-rpath,{os.fspath(d)}" for d in library_dirs]
  links += [name if os.sep in name else f"-l{name}" for name in libraries]
  # A second start needs the compiler's version, not the compiler's run: it is asked for once and
  # kept with the file's time and size.
  path = compiler()
  key = _digest(
    [source, *arguments, *links, _identity(path), cpu(), _headers(), f"{_callgate.KERNEL_ABI}"]
  )
  library = cache_dir() / "kernels" / key[:2] / f"{key}.so"
  if _is_whole(library):
    return library
  library.parent.mkdir(parents=True, exist_ok=True)
  with _locked(library.with_suffix(".lock")):
    if not _is_whole(library):
      _compile(what, source, [path, *arguments], links, library)
  return library


def load(library: Path) -> ctypes.CDLL:
  """The library in this process; it stays until the process ends."""
  with _lock:
    key = str(library)
    if key not in _loaded:
      _loaded[key] = ctypes.CDLL(key, mode=os.RTLD_NOW | os.RTLD_LOCAL)
    return _loaded[key]


def _identity(path: str) -> str:
  status = os.stat(os.path.realpath(path))
  stamp = (status.st_mtime, status.st_size)
  memory = cache_dir() / "compilers" / _digest([os.path.realpath(path), repr(stamp)])[:32]
  with contextlib.suppress(OSError):
    known = memory.read_text()
    if known:
      return known
  version = _version(path, stamp)
  with contextlib.suppress(OSError):
    memory.parent.mkdir(parents=True, exist_ok=True)
    _write(memory, version.encode())
  return version


def _digest(parts: Sequence[str]) -> str:
  return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _is_whole(library: Path) -> bool:
  try:
    return library.with_suffix(".sha256").read_text() == _checksum(library)
  except OSError:
    return False


def _checksum(path: Path) -> str:
  with path.open("rb") as file:
    return hashlib.file_digest(file, "sha256").hexdigest()


def _write(path: Path, content: bytes) -> None:
  """Replaces a file in one step."""
  descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
  with os.fdopen(descriptor, "wb") as file:
    file.write(content)
  os.replace(name, path)


@contextlib.contextmanager
def _locked(path: Path) -> Generator[None]:
  with path.open("w") as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    yield


def _compile(
  what: str, source: str, command: Sequence[str], links: Sequence[str], library: Path
) -> None:
  with tempfile.TemporaryDirectory(dir=library.parent) as folder:
    unit, made = Path(folder) / "kernel.cc", Path(folder) / "kernel.so"
    unit.write_text(source)
    run = [*command, str(unit), "-o", str(made), *links]
    result = subprocess.run(run, capture_output=True, text=True, check=False, cwd=folder)
    if result.returncode != 0:
      output = _readable(result.stderr, folder)
      raise CompileError(f"{what}: the C++ compiler ({command[0]}) refused it:\n{output}", output)
    os.replace(made, library)
    _write(library.with_suffix(".sha256"), _checksum(library).encode())


def _readable(output: str, folder: str) -> str:
  """The compiler's output without the folder of its run."""
  return re.sub(re.escape(folder + os.sep), "", output).rstrip()
