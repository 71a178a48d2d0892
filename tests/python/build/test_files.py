# SPDX-License-Identifier: Apache-2.0
"""Caches of compiled code: who may have written what is in them, and what damage does to them.

The cache keeps texts here instead of libraries, so no test compiles. Ownership by somebody else is
real where the tests run as root, and played elsewhere.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from property_checks import examples

from callgate._build import cache as _cache
from callgate._kernel import files

KEY = "ab" * 32
OTHER = 12345


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
  monkeypatch.setenv("CALLGATE_CACHE_DIR", str(tmp_path / "above" / "cache"))
  return tmp_path / "above" / "cache"


class Kernels:
  """A compiler that counts: what it makes has its own number in it."""

  made = 0

  def make(self, folder: Path) -> tuple[Path, list[str]]:
    self.made += 1
    (folder / "kernel.so").write_text("library")
    return folder / "kernel.so", []

  def get(self) -> Path:
    found = _cache.find_or_make(KEY, self.make)
    assert found.read_text() == "library"
    return found


@pytest.fixture
def kernels() -> Kernels:
  return Kernels()


def belongs_to_another(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
  """In the eyes of callgate."""
  if os.geteuid() == 0:
    os.chown(path, OTHER, OTHER, follow_symlinks=False)
  else:
    monkeypatch.setattr(os, "geteuid", lambda: OTHER)


def below(cache: Path, place: str) -> Path:
  """A folder of the test's by what it is to the cache."""
  return {
    "above": cache.parent,
    "cache": cache,
    "kind": cache / "kernels",
    "leaf": cache / "kernels" / "ab",
  }[place]


# -- who may have written ------------------------------------------------------------------------
@pytest.mark.parametrize("place", ["above", "cache", "kind", "leaf"])
@pytest.mark.parametrize("mode", [0o777, 0o775, 0o707, 0o1777])
def test_a_folder_that_others_can_write_to_is_not_used_and_the_warning_says_what_to_do(
  cache: Path, kernels: Kernels, place: str, mode: int
) -> None:
  kept = kernels.get()
  below(cache, place).chmod(mode)
  if place == "above" and (mode == 0o775 or mode & stat.S_ISVTX):
    assert kernels.get() == kept  # what is in such a folder is its owner's alone, or the group's
    return
  said = (
    rf"{below(cache, place)} can be .* {mode:04o}.*runs the code.*chmod .*go-w.*CALLGATE_CACHE_DIR"
  )
  with pytest.warns(RuntimeWarning, match=said):
    own = kernels.get()
  assert cache not in own.parents
  assert kernels.made == 2
  assert kernels.get() == own  # said once, made once
  assert kernels.made == 2


@pytest.mark.parametrize("place", ["cache", "kind", "leaf"])
def test_a_folder_of_somebody_else_is_not_used(
  cache: Path, kernels: Kernels, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
  kernels.get()
  belongs_to_another(below(cache, place), monkeypatch)
  if os.geteuid() == OTHER:
    place = "cache"  # all of it is
  with pytest.warns(
    RuntimeWarning, match=rf"{below(cache, place)} belongs to user \d+, not to you"
  ):
    assert cache not in kernels.get().parents


def test_the_cache_may_be_a_link_of_ones_own_and_nothing_in_it_one(
  cache: Path, kernels: Kernels, tmp_path: Path
) -> None:
  kernels.get()
  cache.rename(tmp_path / "larger disk")
  cache.symlink_to(tmp_path / "larger disk")
  assert kernels.get().is_relative_to(cache)
  assert kernels.made == 1
  (cache / "kernels").rename(tmp_path / "kernels")
  (cache / "kernels").symlink_to(tmp_path / "kernels")
  with pytest.warns(RuntimeWarning, match="cache/kernels is a link, .*; remove it"):
    assert cache not in kernels.get().parents


def writable(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
  del monkeypatch
  path.chmod(0o666)


def linked(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
  del monkeypatch
  path.rename(path.with_name("elsewhere"))
  path.symlink_to("elsewhere")


def pipe(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
  del monkeypatch
  path.unlink()
  os.mkfifo(path)


CHANGES: list[Callable[[Path, pytest.MonkeyPatch], None]] = [writable, linked, pipe]
if os.geteuid() == 0:
  CHANGES.append(belongs_to_another)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("pattern", ["*.so", "*.json"])
def test_a_file_that_others_may_have_written_is_made_again(
  cache: Path,
  kernels: Kernels,
  change: Callable[[Path, pytest.MonkeyPatch], None],
  pattern: str,
  monkeypatch: pytest.MonkeyPatch,
) -> None:
  kernels.get()
  (file,) = cache.rglob(pattern)
  change(file, monkeypatch)
  for _ in range(2):
    assert kernels.get().is_relative_to(cache)
    assert kernels.made == 2
  assert stat.S_IMODE(file.lstat().st_mode) == 0o600
  assert file.lstat().st_uid == os.geteuid()


@pytest.mark.parametrize("change", CHANGES)
def test_a_lock_file_that_is_not_ones_own_is_refused_and_what_it_leads_to_stays_whole(
  cache: Path,
  kernels: Kernels,
  change: Callable[[Path, pytest.MonkeyPatch], None],
  monkeypatch: pytest.MonkeyPatch,
) -> None:
  kernels.get()
  (lock,) = cache.rglob("*.lock")
  lock.write_text("somebody's work")
  change(lock, monkeypatch)
  (manifest,) = cache.rglob("*.json")
  manifest.unlink()
  with pytest.warns(RuntimeWarning, match=str(lock)):
    assert cache not in kernels.get().parents
  if not lock.is_fifo():
    assert lock.read_text() == "somebody's work"


@pytest.mark.parametrize("umask", [0, 0o777])
def test_new_files_are_for_their_owner_alone_whatever_the_umask(
  cache: Path, kernels: Kernels, umask: int
) -> None:
  before = os.umask(umask)
  try:
    if os.geteuid() == 0 or umask == 0:  # the test's own file as well
      _cache.find_or_make(KEY, kernels.make)
    _cache.remembered("compiler", lambda: "version 1")
    files._install(b"code")  # pyright: ignore[reportPrivateUsage]
  finally:
    os.umask(before)
  modes = {(p.is_dir(), stat.S_IMODE(p.stat().st_mode)) for p in (cache, *cache.rglob("*"))}
  assert modes == {(True, 0o700), (False, 0o600)}


@pytest.mark.parametrize("kind", ["compilers", "loaded"])
def test_other_caches_of_code_are_looked_at_likewise(cache: Path, kind: str) -> None:
  def use() -> str | Path:
    if kind == "compilers":
      return _cache.remembered("compiler", lambda: "asked")
    return files._install(b"code")  # pyright: ignore[reportPrivateUsage]

  use()
  (file,) = (path for path in cache.rglob("*") if path.is_file())
  if kind == "compilers":
    file.write_text("kept")
    assert use() == "kept"
    (cache / kind).chmod(0o777)
    assert use() == "asked"
  else:
    assert use() == file
    file.parent.chmod(0o777)
    with pytest.warns(RuntimeWarning, match="chmod -R go-w"):
      own = use()
    assert isinstance(own, Path)
    assert cache not in own.parents
    assert own.read_bytes() == b"code"


def test_no_other_module_looks_into_the_cache_by_itself() -> None:
  folder = Path(_cache.__file__).parent
  users = {path.name for path in folder.rglob("*.py") if "cache_dir()" in path.read_text()}
  assert users == {"files.py"}


# -- damage --------------------------------------------------------------------------------------
def entry(**fields: object) -> str:
  library = f"{KEY}-0123456789abcdef.so"
  return json.dumps([{"library": library, "checksum": "0", "dependencies": {}, **fields}])


DAMAGE: dict[str, str | None] = {
  "a folder": None,
  "nothing": "",
  "deep": "[" * 100_000,
  "deep and whole": "[" * 100_000 + "]" * 100_000,
  "a number": "7",
  "a number of many digits": "1" * 10_000,
  "a NUL in a library's name": entry(library="a\0b"),
  "a folder as library": entry(library=".."),
  "no UTF-8": '[{"library": 3}\udcff',
  "other types": entry(library=3, checksum=None),
  "another key's library": entry(library=f"{'cd' * 32}-0123456789abcdef.so"),
  "a name that no file has": entry(dependencies={"\ud800": "0", "a\0b": "0"}),
  "a long name": entry(dependencies={"a" * 5000: "0"}),
  "a device": entry(dependencies={"/dev/zero": "0"}),
  "a list of dependencies": entry(dependencies=["/dev/zero"]),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=list(DAMAGE))
def test_a_damaged_manifest_is_built_again(
  cache: Path, kernels: Kernels, damage: str | None
) -> None:
  kernels.get()
  (manifest,) = cache.rglob("*.json")
  if damage is None:
    manifest.unlink()
    (manifest / "within").mkdir(parents=True)
  else:
    manifest.write_bytes(damage.encode("utf-8", "surrogateescape"))
  for _ in range(2):
    kernels.get()
    assert kernels.made == 2


@pytest.mark.parametrize("content", [None, b"", b"lib", b"libraru"])
def test_a_library_that_is_not_what_was_made_is_built_again(
  cache: Path, kernels: Kernels, content: bytes | None
) -> None:
  kernels.get()
  (library,) = cache.rglob("*.so")
  library.unlink()
  if content is not None:
    library.write_bytes(content)
    library.chmod(0o600)
  for _ in range(2):
    kernels.get()
    assert kernels.made == 2


@pytest.mark.parametrize("pattern", ["*.so", "*.lock"])
def test_a_folder_in_the_place_of_a_file_is_replaced(
  cache: Path, kernels: Kernels, pattern: str
) -> None:
  kernels.get()
  (file,) = cache.rglob(pattern)
  file.unlink()
  (file / "within").mkdir(parents=True)
  if pattern == "*.lock":
    next(cache.rglob("*.json")).unlink()
  for _ in range(2):
    assert kernels.get().is_relative_to(cache)
    assert kernels.made == 2
  assert file.is_file()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
  with pytest.MonkeyPatch.context() as patch:
    folder = tmp_path_factory.mktemp("cache")
    patch.setenv("CALLGATE_CACHE_DIR", str(folder / "cache"))
    yield folder / "cache"


@examples(100)
@given(cut=st.integers(0, 300), change=st.integers(0, 255), rest=st.binary(max_size=40))
def test_no_bytes_in_a_manifest_keep_a_kernel_from_being_made(
  shared: Path, cut: int, change: int, rest: bytes
) -> None:
  kernels = Kernels()
  kernels.get()
  (manifest,) = shared.rglob("*.json")
  content = manifest.read_bytes()
  damaged = content[:cut] + bytes([change]) + rest
  manifest.write_bytes(damaged if change & 1 else damaged + content[len(damaged) :])
  kernels.get()
