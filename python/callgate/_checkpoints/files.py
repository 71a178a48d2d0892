# SPDX-License-Identifier: Apache-2.0
"""Checkpoints on disk: a folder each, which is either complete or invisible.

`step_0000001000/` holds `meta.json` and a `.npz` for each shard, with the shard's parts of the
leaves (`parts`). Writers write into a folder with a dot before its name, which gets its own name
when every part is on the disk. The writer of the last part renames it, in any process. If several
find the parts complete, the one that makes `meta.json` renames it.

The hidden name has the number of the run, which is an execution of the program in all its
processes. So a later run never completes an incomplete folder of an earlier run. Each writer of a
run writes its parts in order. So a checkpoint is complete only after those before it.

A run that saves a step of an earlier run swaps the two folders in one step. On a file system
without such a swap it takes two steps; in between, the older one is `.step_0000001000-old`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import shutil
import threading
import uuid
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from callgate._checkpoints import parts as _parts
from callgate._checkpoints.parts import InOrbax, Leaf, Saved, Slices
from callgate._core import paths

_OLD = "-old"
_TRIES = 5  # attempts to replace a folder that another process restores
# Runs that have begun in this process, or whose parts it has written. Atomic: single steps;
# never emptied: one number for each run, whose parts may come at any time.
_runs: set[int] = set()
_naming = threading.Lock()  # held while a step's folder has another one's name


def whole(root: Path) -> list[Saved]:
  """Returns the complete checkpoints of a folder, the newest last, without damaged ones."""
  found = [_parts.saved_in(folder, step) for folder, step in _named(root)]
  return sorted(filter(None, found), key=lambda saved: saved.order)


def damaged(root: Path, found: Iterable[Saved]) -> list[tuple[Path, int]]:
  """Returns folders named like a checkpoint that aren't in `found`, with their steps.

  The step of a name without a number is -1.
  """
  good = {saved.folder for saved in found}
  return sorted((folder, step) for folder, step in _named(root) if folder not in good)


def _named(root: Path) -> Iterator[tuple[Path, int]]:
  for folder in root.glob("step_*"):
    yield folder, _step_of(folder.name)
  for old in root.glob(f".step_*{_OLD}"):
    name = old.name[1 : -len(_OLD)]
    if not (root / name).exists():
      yield old, _step_of(name)


def _step_of(name: str) -> int:
  digits = name.removeprefix("step_")
  step = int(digits) if digits.isascii() and digits.isdecimal() else -1
  return step if name == _name(step) else -1


def find(root: Path, step: int) -> Saved:
  """Returns the checkpoint of a step that this or another process has seen.

  Raises:
    FileNotFoundError: there is no such checkpoint.
  """
  found = [saved for saved in whole(root) if saved.step == step]
  if not found:
    raise FileNotFoundError(
      f"{root}: expected the checkpoint of step {step}, which process 0 found, got none; all "
      "processes of a program must share one folder"
    )
  return found[-1]


def begin(root: Path, run: int) -> None:
  """Prepares the folder; removes incomplete folders of processes that were killed."""
  root.mkdir(parents=True, exist_ok=True)
  clean(root)
  _runs.add(run)


def clean(root: Path) -> None:
  """Removes incomplete folders, except of this process's runs; restores replaced checkpoints."""
  with _naming:
    for old in root.glob(f".step_*{_OLD}"):
      with contextlib.suppress(OSError):  # a newer checkpoint of the step exists
        old.rename(root / old.name[1 : -len(_OLD)])
  half_written = list(root.glob(".step_*"))
  # Read after the folders: a run that another thread begins meanwhile is here before its folder.
  ours = {_ending(run) for run in _runs.copy()}
  for folder in half_written:
    if folder.name.rpartition("_")[2] not in ours:
      _delete(folder)


def _unfinished(root: Path, step: int, run: int) -> Path:
  return root / f".{_name(step)}_{_ending(run)}"


def _name(step: int) -> str:
  return f"step_{step:010d}"


def _ending(run: int) -> str:
  return f"{run & 0xFFFFFFFF:08x}"


def take_part(run: int) -> None:
  """Declares that this process writes parts of a run, which may have begun in another process."""
  _runs.add(run)


def write(root: Path, step: int, run: int, name: str, parts: dict[int, tuple[Slices, Any]]) -> None:
  """Writes parts of a checkpoint.

  Args:
    root: the folder of all checkpoints.
    step: the checkpoint's step.
    run: the execution of the program, which has the same number in all processes.
    name: the file's name, unique among the writers of this checkpoint.
    parts: by the leaf's number: the slices of the part, and the array.

  Raises:
    OSError: it can't be written; nothing of the step is left.
  """
  folder = _unfinished(root, step, run)
  arrays = {str(number): _parts.plain(array) for number, (_, array) in parts.items()}
  where = {number: [[s.start, s.stop] for s in slices] for number, (slices, _) in parts.items()}
  with _removed_if_not_written(folder):
    folder.mkdir(parents=True, exist_ok=True)
    _put(folder / f"{name}.npz", lambda file: np.savez(file, **arrays))  # pyright: ignore
    _put(folder / f"{name}.json", lambda file: file.write(_parts.sealed({"parts": where})))


@contextlib.contextmanager
def _removed_if_not_written(folder: Path) -> Generator[None]:
  """Removes the folder if an exception ends the block, such as that of a full disk."""
  try:
    yield
  except OSError:
    shutil.rmtree(folder, ignore_errors=True)
    raise


def finish(
  root: Path,
  step: int,
  run: int,
  leaves: Sequence[Leaf],
  feeds: Mapping[str, int] | None = None,
  refused: Callable[[], bool] = lambda: False,
  rewrite: Callable[[Saved], InOrbax | None] = lambda _: None,
) -> Path | None:
  """Makes a checkpoint of the parts of all writers, if they are complete.

  Args:
    root: the folder of all checkpoints.
    step: the checkpoint's step.
    run: as in `write`.
    leaves: all leaves of the carry.
    feeds: the number of items that each feed of the loop's body has given.
    refused: asked first; True if the step must not be saved.
    rewrite: called by the writer that completes it. Its result, unless None, replaces the parts.

  Returns:
    The checkpoint's folder, if this call has completed it.
  """
  folder = _unfinished(root, step, run)
  try:
    if not _parts.is_complete(list(_parts.listed(folder)), leaves) or refused():
      return None
  except FileNotFoundError:
    return None  # another writer was faster
  with _removed_if_not_written(folder):
    order = max((saved.order for saved in whole(root)), default=0) + 1
    about: dict[str, Any] = {
      "format": _parts.FORMAT, "step": step, "order": order,
      "leaves": [dataclasses.asdict(leaf) for leaf in leaves],
      "feeds": list((feeds or {}).items()),
    }  # fmt: skip
    try:
      _write(folder / "meta.json", "xb", lambda file: file.write(_parts.sealed(about)))
    except (FileExistsError, FileNotFoundError):
      return None  # another writer was faster
    if (orbax := rewrite(Saved(folder, step, order, tuple(leaves)))) is not None:
      other = {**about, "format": _parts.FORMAT_ORBAX, **dataclasses.asdict(orbax)}
      _put(folder / "meta.json", lambda file: file.write(_parts.sealed(other)))
      for part in folder.glob("part_*"):
        part.unlink()
    _sync(folder)
    _give_name(folder, named := root / _name(step))
    _sync(root)
  for older in root.glob(f".step_*_{_ending(run)}"):  # earlier steps that could not be written
    if older.name < folder.name:
      shutil.rmtree(older, ignore_errors=True)
  return named


def _give_name(folder: Path, named: Path) -> None:
  """Renames a complete folder; it may replace one of an earlier run of the loop."""
  old = named.with_name(f".{named.name}{_OLD}")
  for left in reversed(range(_TRIES)):
    try:
      with _naming:
        if not os.path.lexists(named):
          folder.rename(named)
        elif not paths.exchange(folder, named):
          _delete(old)
          named.rename(old)
          folder.rename(named)
      break
    except OSError as error:  # another process has restored the older one
      if error.errno not in (errno.ENOTEMPTY, errno.EEXIST) or not left:
        raise
  for gone in (folder, old):
    _remove(gone, named.name)


def _remove(folder: Path, name: str) -> None:
  """Removes a checkpoint's folder; it stops being a checkpoint at once."""
  gone = folder.with_name(f".{name}.{uuid.uuid4().hex}")
  with contextlib.suppress(FileNotFoundError):
    folder.rename(gone)
  _delete(gone)


def _delete(path: Path) -> None:
  """Removes a folder with its content; removes only the link, if it is one, or the file."""
  if path.is_symlink() or not path.is_dir():
    with contextlib.suppress(OSError):
      path.unlink()
  else:
    shutil.rmtree(path, ignore_errors=True)


def keep_newest(root: Path, count: int) -> None:
  """Removes all but the newest `count`; a checkpoint being removed is no longer visible."""
  for saved in whole(root)[:-count]:
    _remove(saved.folder, _name(saved.step))
  for folder in root.glob(".step_*.*"):
    _delete(folder)


def _put(path: Path, write: Callable[[IO[bytes]], object]) -> None:
  """Writes a file atomically."""
  made = path.with_name(f"{path.name}.new")
  _write(made, "wb", write)
  made.rename(path)


def _write(path: Path, mode: str, write: Callable[[IO[bytes]], object]) -> None:
  with path.open(mode) as file:
    write(file)
    file.flush()
    os.fsync(file.fileno())


def sync_all(folder: Path) -> None:
  """Syncs all files and folders below a folder to the disk."""
  for path, _, names in os.walk(folder):
    for name in (*names, "."):
      _sync(Path(path, name))


def _sync(folder: Path) -> None:
  number = os.open(folder, os.O_RDONLY)
  try:
    os.fsync(number)
  finally:
    os.close(number)
