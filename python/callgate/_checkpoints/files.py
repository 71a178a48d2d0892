# SPDX-License-Identifier: Apache-2.0
"""Checkpoints on disk: a folder each, which is there whole or not at all.

`step_0000001000/` holds `meta.json` and a `.npz` for each shard, with the parts of the leaves that
the shard had. All is written into a folder with a dot before its name, which gets its own name
when every part is on the disk. Whoever has written the last part does so, in whatever process: of
several who find the parts complete it is the one that makes `meta.json`.

The folder's hidden name has the number of the run, an execution of the program in all its
processes: what an earlier run has left half written is never completed by a later one. Since each
writer of a run writes its parts in order, a checkpoint is whole only after those before it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import shutil
import uuid
import zipfile
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import IO, Any

import ml_dtypes
import numpy as np

from callgate._core.dtypes import type_text

FORMAT, FORMAT_ORBAX = 1, 2
_runs: set[int] = set()  # those that have begun in this process, or whose parts it has written
Slices = tuple[slice, ...]


@dataclasses.dataclass(frozen=True)
class Leaf:
  """What is known of an array of the carry."""

  name: str  # its path, as "['w'][0]"
  shape: tuple[int, ...]
  dtype: str

  def __str__(self) -> str:
    return type_text(_dtype(self.dtype), self.shape)


@dataclasses.dataclass(frozen=True)
class InOrbax:
  """What is known of a checkpoint that Orbax has written."""

  paths: tuple[tuple[str, ...], ...]  # of each leaf
  sums: tuple[int, ...]  # of each leaf's bytes


@dataclasses.dataclass(frozen=True)
class Saved:
  """A checkpoint that is whole."""

  folder: Path
  step: int
  order: int  # the later one of two has the greater
  leaves: tuple[Leaf, ...]
  orbax: InOrbax | None = None  # where Orbax's files stand for the parts


def whole(root: Path) -> list[Saved]:
  """The checkpoints of a folder, the newest last; what is damaged is none of them."""
  found = [saved for folder in _named(root) if (saved := _saved(folder)) is not None]
  return sorted(found, key=lambda saved: saved.order)


def damaged(root: Path, found: Iterable[Saved]) -> list[Path]:
  """What has the name of a checkpoint, and is none of those that were `found`."""
  return sorted({*_named(root)} - {saved.folder for saved in found})


def _named(root: Path) -> Iterable[Path]:
  return root.glob("step_*")


def _saved(folder: Path) -> Saved | None:
  with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
    about = _opened((folder / "meta.json").read_bytes())
    if about["format"] in (FORMAT, FORMAT_ORBAX) and folder.name == _name(about["step"]):
      leaves = tuple(Leaf(x["name"], tuple(x["shape"]), x["dtype"]) for x in about["leaves"])
      orbax = None
      if about["format"] == FORMAT_ORBAX:
        orbax = InOrbax(tuple(map(tuple, about["paths"])), tuple(about["sums"]))
      return Saved(folder, about["step"], about["order"], leaves, orbax)
  return None


def find(root: Path, step: int) -> Saved:
  """The checkpoint of a step that another process, or this one, has seen.

  Raises:
    FileNotFoundError: it isn't there.
  """
  found = [saved for saved in whole(root) if saved.step == step]
  if not found:
    raise FileNotFoundError(
      f"{root}: expected the checkpoint of step {step}, which process 0 has found, got none; of a "
      "program over several processes all have to see one folder"
    )
  return found[-1]


def intact(saved: Saved) -> bool:
  """True if all files of a checkpoint are what was written, by their checksums."""
  try:
    for file in saved.folder.glob("part_*.npz"):
      with zipfile.ZipFile(file) as archive:
        if archive.testzip() is not None:
          return False
    return _complete(saved.folder, saved.leaves)
  except (OSError, ValueError, LookupError, zipfile.BadZipFile, zlib.error, EOFError):
    return False


def begin(root: Path, run: int) -> None:
  """Prepares the folder; removes what processes that were killed have left half written."""
  root.mkdir(parents=True, exist_ok=True)
  clean(root)
  _runs.add(run)


def clean(root: Path) -> None:
  ours = {_ending(run) for run in _runs}
  for folder in root.glob(".step_*"):
    if folder.name.rpartition("_")[2] not in ours:
      shutil.rmtree(folder, ignore_errors=True)


def _unfinished(root: Path, step: int, run: int) -> Path:
  return root / f".{_name(step)}_{_ending(run)}"


def _name(step: int) -> str:
  return f"step_{step:010d}"


def _ending(run: int) -> str:
  return f"{run & 0xFFFFFFFF:08x}"


def take_part(run: int) -> None:
  """Says that this process writes parts of a run, which may have begun in another one."""
  _runs.add(run)


def write(
  root: Path,
  step: int,
  run: int,
  name: str,
  leaves: Sequence[Leaf],
  parts: dict[int, tuple[Slices, Any]],
) -> None:
  """Writes parts of a checkpoint.

  Args:
    root: the folder of all checkpoints.
    step: its number.
    run: the execution of the program, which has the same number in all processes.
    name: of the file, which no other writer of this checkpoint has.
    leaves: all of the carry.
    parts: by the leaf's number which part of it, and the array.
  """
  folder = _unfinished(root, step, run)
  folder.mkdir(parents=True, exist_ok=True)
  arrays = {str(number): _plain(array) for number, (_, array) in parts.items()}
  _put(folder / f"{name}.npz", lambda file: np.savez(file, **arrays))  # pyright: ignore
  where = {number: [[s.start, s.stop] for s in slices] for number, (slices, _) in parts.items()}
  _put(folder / f"{name}.json", lambda file: file.write(_sealed({"parts": where})))


def finish(
  root: Path,
  step: int,
  run: int,
  leaves: Sequence[Leaf],
  refused: Callable[[], bool] = lambda: False,
  rewrite: Callable[[Saved], InOrbax | None] = lambda _: None,
) -> Path | None:
  """Makes a checkpoint of the parts of all writers, if they are there.

  Args:
    root: the folder of all checkpoints.
    step: its number.
    run: as in `write`.
    leaves: all of the carry.
    refused: asked before.
    rewrite: called by the one that makes it one; if it returns something, for what stands in the
      place of the parts.

  Returns:
    The checkpoint's folder, if it is whole by now and this call has made it so.
  """
  folder = _unfinished(root, step, run)
  try:
    if not _complete(folder, leaves) or refused():
      return None
    order = max((saved.order for saved in whole(root)), default=0) + 1
    described = [dataclasses.asdict(leaf) for leaf in leaves]
    about = {"format": FORMAT, "step": step, "order": order, "leaves": described}
    _write(folder / "meta.json", "xb", lambda file: file.write(_sealed(about)))
  except (FileExistsError, FileNotFoundError):
    return None  # another one was quicker
  if (orbax := rewrite(Saved(folder, step, order, tuple(leaves)))) is not None:
    other = {**about, "format": FORMAT_ORBAX, **dataclasses.asdict(orbax)}
    _put(folder / "meta.json", lambda file: file.write(_sealed(other)))
    for part in folder.glob("part_*"):
      part.unlink()
  _sync(folder)
  named = root / _name(step)
  if named.exists():  # of an earlier run of the loop
    named.rename(root / f".{_name(step)}.{uuid.uuid4().hex}")
  folder.rename(named)
  _sync(root)
  for older in root.glob(f".step_*_{_ending(run)}"):  # what could not be written: see above
    if older.name < folder.name:
      shutil.rmtree(older, ignore_errors=True)
  return named


def keep_newest(root: Path, count: int) -> None:
  """Removes all but so many; one that is being removed is no checkpoint any more."""
  for saved in whole(root)[:-count]:
    gone = root / f".{saved.folder.name}.{uuid.uuid4().hex}"
    with contextlib.suppress(FileNotFoundError):
      saved.folder.rename(gone)
  for folder in root.glob(".step_*.*"):
    shutil.rmtree(folder, ignore_errors=True)


def read(saved: Saved, number: int, wanted: Slices) -> Any:
  """A part of a leaf.

  Raises:
    OSError, ValueError: a file is damaged.
  """
  leaf = saved.leaves[number]
  dtype = _dtype(leaf.dtype)
  made = np.empty([s.stop - s.start for s in wanted], dtype)
  missing = made.size
  for file, where in _parts(saved.folder):
    if number not in where:
      continue
    have = where[number]
    both = [
      slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(have, wanted, strict=True)
    ]
    if any(s.start >= s.stop for s in both):
      continue
    try:
      part = _array(file, number, dtype, [s.stop - s.start for s in have])
    except (OSError, ValueError, KeyError, zipfile.BadZipFile, zlib.error, EOFError) as error:
      raise ValueError(
        f"{file}: expected a file that is whole, got a damaged one: {error}"
      ) from error
    inner = tuple(
      slice(s.start - h.start, s.stop - h.start) for s, h in zip(both, have, strict=True)
    )
    outer = tuple(
      slice(s.start - w.start, s.stop - w.start) for s, w in zip(both, wanted, strict=True)
    )
    made[outer] = part[inner]
    missing -= math.prod(s.stop - s.start for s in both)
  if missing > 0:
    raise ValueError(f"{saved.folder}: {leaf.name}: {missing} of {made.size} elements are missing")
  return made


def _array(file: Path, number: int, dtype: Any, shape: Sequence[int]) -> Any:
  """An array of a `.npz`. NumPy reads headers by `ast`, which fails in threads of Python 3.11."""
  with zipfile.ZipFile(file) as archive:
    data = archive.read(f"{number}.npy")
  long = data[6] > 1  # of format 2 and later
  size = int.from_bytes(data[8 : 12 if long else 10], "little")
  return np.frombuffer(data, dtype, offset=size + (12 if long else 10)).reshape(shape)


def _parts(folder: Path) -> Iterable[tuple[Path, dict[int, Slices]]]:
  """The files of a folder, none of which has a part that another one has."""
  seen: set[tuple[int, tuple[tuple[int, int], ...]]] = set()
  for path in sorted(folder.glob("part_*.json")):
    where: dict[int, Slices] = {}
    for number, ends in _opened(path.read_bytes())["parts"].items():
      key = int(number), tuple((a, b) for a, b in ends)
      if key not in seen:
        where[int(number)] = tuple(slice(a, b) for a, b in ends)
      seen.add(key)
    yield path.with_suffix(".npz"), where


def _complete(folder: Path, leaves: Sequence[Leaf]) -> bool:
  missing = {number: math.prod(leaf.shape) for number, leaf in enumerate(leaves)}
  for _, where in _parts(folder):
    for number, slices in where.items():
      missing[number] -= math.prod(s.stop - s.start for s in slices)
  return not any(missing.values())


def _sealed(about: dict[str, Any]) -> bytes:
  """JSON with its checksum."""
  return json.dumps({**about, "crc32": zlib.crc32(json.dumps(about).encode())}).encode()


def _opened(sealed: bytes) -> dict[str, Any]:
  """Raises a ValueError or KeyError where it is not what was sealed."""
  about = json.loads(sealed)
  if about.pop("crc32") != zlib.crc32(json.dumps(about).encode()):
    raise ValueError("its checksum is another")
  return about


def _put(path: Path, write: Callable[[IO[bytes]], object]) -> None:
  """Writes a file that is there whole or not at all."""
  made = path.with_name(f"{path.name}.new")
  _write(made, "wb", write)
  made.rename(path)


def _write(path: Path, mode: str, write: Callable[[IO[bytes]], object]) -> None:
  with path.open(mode) as file:
    write(file)
    file.flush()
    os.fsync(file.fileno())


def sync_all(folder: Path) -> None:
  """Has all files and folders below one be on the disk."""
  for path, _, names in os.walk(folder):
    for name in (*names, "."):
      _sync(Path(path, name))


def _sync(folder: Path) -> None:
  number = os.open(folder, os.O_RDONLY)
  try:
    os.fsync(number)
  finally:
    os.close(number)


def _dtype(name: str) -> Any:
  return np.dtype(getattr(ml_dtypes, name, name))


def _plain(array: Any) -> Any:
  """An array of a type that NumPy's files know: of the others the bits."""
  array = np.ascontiguousarray(array).reshape(np.shape(array))
  return array.view(f"u{array.itemsize}") if hasattr(ml_dtypes, array.dtype.name) else array
