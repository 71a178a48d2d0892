# SPDX-License-Identifier: Apache-2.0
"""Keeps compiled code on disk, and checks who may have written it, because it will be executed.

Each cache of callgate is a folder below `cache_dir()`. The folder and its files, which are opened
without following links, belong to this user or to root, and no other user can write to them. A
folder that breaks this is rejected with a warning, and the process uses a private folder; a file is
made again. New files are for their owner only, whatever the umask. Any thread may call these
functions; they raise OSError.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import hashlib
import io
import os
import shutil
import stat
import tempfile
import threading
import warnings
from collections.abc import Generator
from pathlib import Path

_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_lock = threading.Lock()
# The private folders by the cache that each replaces. Guarded by _lock; never emptied: one entry
# for each folder that CALLGATE_CACHE_DIR has named.
_private: dict[str, Path] = {}
_told: set[str] = set()


class UntrustedError(PermissionError):
  """Another user may have written this file or folder."""


def cache_dir() -> Path:
  """Returns the folder of compiled kernels: `CALLGATE_CACHE_DIR`, or one in the user's cache."""
  if given := os.environ.get("CALLGATE_CACHE_DIR"):
    return Path(given).absolute()
  base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
  return Path(base).absolute() / "callgate"


# -- folders -------------------------------------------------------------------------------------
def kept_folder(*names: str) -> Path:
  """Returns a folder of the cache, which may be absent; raises if other users can write to it."""
  folder = cache_dir()
  for path in folder.resolve().parents:
    # A user who can rename a folder can replace it, so this checks the parent's writers.
    with contextlib.suppress(FileNotFoundError):
      mode = path.stat().st_mode
      if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        raise _refusal(path, _mode(mode), f"run chmod go-w '{path}'")
  for name in ("", *names):
    folder = folder / name
    try:
      found = folder.lstat()
      if stat.S_ISLNK(found.st_mode):
        if name or found.st_uid not in (os.geteuid(), 0):  # users link caches to larger disks
          raise _refusal(folder, "is a link", "remove it")
        found = folder.stat()
    except FileNotFoundError:
      break
    if not stat.S_ISDIR(found.st_mode):
      raise NotADirectoryError(20, f"{folder} is not a folder")
    _check_owner(folder, found)
  return cache_dir().joinpath(*names)


def usable_folder(*names: str) -> Path:
  """Returns a folder of the cache, made if it is absent; raises if it can't be used."""
  _make_folders(kept_folder(*names))
  return kept_folder(*names)  # another user may have made one in between


def made_folder(*names: str, quiet: bool = False) -> Path:
  """Returns a folder of the cache, or a private one if that can't be used."""
  try:
    return usable_folder(*names)
  except OSError as error:
    return private_folder(error, *names, quiet=quiet)


def private_folder(problem: OSError, *names: str, quiet: bool = False) -> Path:
  """Returns a folder of this process only, in place of a cache folder with a problem.

  quiet: True omits the warning, unless another user may have written there.
  """
  cache = str(cache_dir())
  with _lock:
    folder = _private.get(cache)
    if folder is None:
      _private[cache] = folder = Path(tempfile.mkdtemp(prefix="callgate-"))
      owner = os.getpid()  # not a forked child
      atexit.register(lambda: os.getpid() == owner and shutil.rmtree(folder, ignore_errors=True))
    say = cache not in _told and (not quiet or isinstance(problem, UntrustedError))
    if say:
      _told.add(cache)
  _make_folders(folder.joinpath(*names))
  if say:
    warnings.warn(
      f"callgate: kernels can't be cached in {cache} ({problem.strerror or problem}), so each "
      "process compiles its own. Set the environment variable CALLGATE_CACHE_DIR to a folder "
      "that only you can write to",
      RuntimeWarning,
      stacklevel=2,
    )
  return folder.joinpath(*names)


def _make_folders(folder: Path) -> None:
  for path in (*reversed(folder.parents), folder):
    with contextlib.suppress(FileExistsError):
      if not path.is_dir():
        path.mkdir(mode=0o700)
        path.chmod(0o700)  # the umask may have removed the owner's permissions


def _check_owner(path: Path, found: os.stat_result) -> None:
  if found.st_uid not in (os.geteuid(), 0):
    raise _refusal(path, f"belongs to user {found.st_uid}, not to you", "remove it")
  if found.st_mode & _OTHERS:
    change = f"remove the files that are not yours, then run chmod -R go-w '{path}'"
    raise _refusal(path, _mode(found.st_mode), change)


def _mode(mode: int) -> str:
  return f"can be written to by other users (mode {stat.S_IMODE(mode):04o})"


def _refusal(path: Path, problem: str, remedy: str) -> UntrustedError:
  return UntrustedError(1, f"{path} {problem}, and callgate runs the code in it; {remedy}")


# -- files ---------------------------------------------------------------------------------------
def checksum(path: str | os.PathLike[str]) -> str:
  """Returns the digest of a regular file's content, whoever owns it."""
  with _opened(Path(path), os.O_RDONLY, follow=True) as file:
    return hashlib.file_digest(file, "sha256").hexdigest()


def read(path: Path) -> bytes:
  """Returns the content of a file in a cache folder; raises if other users can write to it."""
  with _opened(path, os.O_RDONLY) as file:
    _check_owner(path, os.fstat(file.fileno()))
    return file.read()


def write(path: Path, content: bytes) -> None:
  """Replaces a file, or whatever is in its place, atomically."""
  descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.new-")
  try:
    with open(descriptor, "wb") as file:
      file.write(content)
    move(Path(name), path)
  finally:
    Path(name).unlink(missing_ok=True)  # if it was not renamed


def move(made: Path, path: Path) -> None:
  """Moves a new file into the cache, readable only by its owner."""
  made.chmod(0o600)
  try:
    os.replace(made, path)
  except IsADirectoryError:  # damage: callgate makes no folder there
    shutil.rmtree(path)
    os.replace(made, path)


@contextlib.contextmanager
def locked(path: Path) -> Generator[None]:
  """Holds a lock between processes, which its holder's death releases. The file stays unchanged."""
  if path.is_dir() and not path.is_symlink():  # damage, as above
    shutil.rmtree(path, ignore_errors=True)
  with _opened(path, os.O_RDWR | os.O_CREAT) as file:
    _check_owner(path, os.fstat(file.fileno()))
    with contextlib.suppress(OSError):  # a cache of root
      os.fchmod(file.fileno(), 0o600)
    fcntl.flock(file, fcntl.LOCK_EX)
    yield


def _opened(path: Path, flags: int, *, follow: bool = False) -> io.FileIO:
  """Opens a regular file, without waiting for a writer if it is a pipe."""
  flags |= os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
  try:
    descriptor = os.open(path, flags, 0o600)
  except ValueError as error:  # a NUL, or a name that no file system supports
    raise FileNotFoundError(2, str(error)) from None
  except OSError:
    if not follow and path.is_symlink():
      raise _refusal(path, "is a link", "remove it") from None
    raise
  if not stat.S_ISREG(os.fstat(descriptor).st_mode):
    os.close(descriptor)
    raise OSError(22, f"{path} is not a regular file")
  return io.FileIO(descriptor, "r" if flags & os.O_ACCMODE == os.O_RDONLY else "r+")
