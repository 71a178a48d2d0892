# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in Orbax's format: process 0 gathers the parts.

Orbax writes the arrays of devices, in processes that wait for each other. But here the program
continues meanwhile. So the devices' parts are first written to the disk (`files`), and Orbax's
checkpoint is made from these. Process 0 uses Orbax as a program of a single process would, with
NumPy arrays, and on a Python thread, because Orbax's own threads need one.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import shutil
import threading
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from callgate._checkpoints import files, parts
from callgate._core import extras
from callgate._core.errors import GateDefinitionError

FOLDER = "default"  # the name that Orbax's CheckpointManager uses for a step's only item
_count = itertools.count()
_lock = threading.Lock()
# The checkpoint read last, for all devices of a program. Guarded by _lock.
_kept: tuple[Any, list[Any]] | None = None


def library() -> Any:
  """Returns Orbax. Raises a GateDefinitionError if it isn't installed."""
  return extras.library("orbax.checkpoint", "Orbax", "orbax", by="Checkpoints: format='orbax'")


def check(leaves: Sequence[parts.Leaf]) -> None:
  """Raises a GateDefinitionError for arrays that Orbax can't write."""
  if not leaves:
    raise GateDefinitionError(
      "Checkpoints: format='orbax': expected a carry with arrays, got one without; use "
      "format='npz', which saves the step alone"
    )
  for leaf in leaves:
    if 0 in leaf.shape:
      raise GateDefinitionError(
        f"Checkpoints: format='orbax': expected arrays with elements, got {leaf.name}: {leaf}; "
        "use format='npz'"
      )


def write(pieces: parts.Saved, structure: Any) -> parts.InOrbax | None:
  """Writes a checkpoint from its parts; None at the end of the process, when Orbax can't write."""
  if not threading.main_thread().is_alive():
    return None
  forget()
  whole = [tuple(slice(0, n) for n in leaf.shape) for leaf in pieces.leaves]
  arrays = [parts.read(pieces, number, slices) for number, slices in enumerate(whole)]
  folder = pieces.folder / FOLDER
  try:
    _apart(_save, folder, jax.tree.unflatten(structure, arrays))
    files.sync_all(folder)
  except BaseException:
    shutil.rmtree(folder, ignore_errors=True)
    raise
  return parts.InOrbax(_paths(structure), tuple(map(_sum, arrays)))


def read(saved: parts.Saved, number: int, wanted: parts.Slices) -> Any:
  """Returns a part of a leaf.

  Raises:
    GateDefinitionError: Orbax is not installed.
    ValueError: the checkpoint is damaged.
  """
  try:
    return np.array(_arrays(saved)[number][wanted])
  except GateDefinitionError:
    raise
  except Exception as error:
    raise ValueError(
      f"{saved.folder / FOLDER}: expected a checkpoint by Orbax, got files that it can't read: "
      f"{error}"
    ) from error


def intact(saved: parts.Saved) -> bool:
  """True if the arrays match their checksums. Raises as `read` without Orbax."""
  assert saved.orbax is not None
  try:
    return tuple(map(_sum, _arrays(saved))) == saved.orbax.sums
  except GateDefinitionError:
    raise
  except Exception:  # noqa: BLE001 - its libraries may raise anything for a damaged file
    return False


def forget() -> None:
  """Frees the checkpoint that was read last."""
  global _kept
  with _lock:
    _kept = None


def _arrays(saved: parts.Saved) -> list[Any]:
  global _kept
  assert saved.orbax is not None
  library()
  with _lock:
    key = saved.folder, (saved.folder / "meta.json").stat().st_mtime_ns
    if _kept is None or _kept[0] != key:
      _kept = None
      tree = _apart(_restore, saved.folder / FOLDER)
      found = [_at(tree, path) for path in saved.orbax.paths]
      for array, leaf in zip(found, saved.leaves, strict=True):
        if (array.shape, array.dtype.name) != (leaf.shape, leaf.dtype):
          raise ValueError(f"{leaf.name}: expected {leaf}, got {array.dtype}{list(array.shape)}")
      _kept = key, found
    return _kept[1]


def _save(folder: Path, tree: Any) -> None:
  ocp = library()
  with _checkpointer(ocp) as one:
    one.save(folder, args=ocp.args.PyTreeSave(tree))


def _restore(folder: Path) -> Any:
  ocp = library()
  with _checkpointer(ocp) as one:
    return one.restore(folder, args=ocp.args.PyTreeRestore())


def _checkpointer(ocp: Any) -> Any:
  """Returns a checkpointer that waits for no other process."""
  own = jax.process_index()
  alone = ocp.options.MultiprocessingOptions(
    primary_host=own,
    active_processes={own},
    barrier_sync_key_prefix=f"callgate-{own}-{next(_count)}",
  )
  handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=alone)
  return ocp.Checkpointer(handler, multiprocessing_options=alone)


def _apart(function: Callable[..., Any], *args: Any) -> Any:
  with concurrent.futures.ThreadPoolExecutor(1, "callgate orbax") as pool:
    return pool.submit(function, *args).result()


def _paths(structure: Any) -> tuple[tuple[str, ...], ...]:
  """Returns the keys of each leaf in Orbax's dicts and lists."""
  tree = jax.tree.unflatten(structure, range(structure.num_leaves))
  return tuple(
    tuple(str(_name(key)) for key in path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)
  )


def _name(key: Any) -> Any:
  return next(getattr(key, name) for name in ("key", "idx", "name") if hasattr(key, name))


def _at(tree: Any, path: Sequence[str]) -> Any:
  for key in path:
    tree = tree[int(key)] if isinstance(tree, (list, tuple)) else tree[key]
  return np.asarray(tree)


def _sum(array: Any) -> int:
  plain: Any = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
  return zlib.crc32(plain)
