# SPDX-License-Identifier: Apache-2.0
"""The parts of a carry in a checkpoint's folder, and their checksums.

A shard's parts are two files: `part_*.npz` holds the arrays, `part_*.json` their leaves and slices.
Every file has a checksum. Reading raises one error, a ValueError, for each way in which a file can
be damaged, truncated, missing or unreadable.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import ml_dtypes
import numpy as np

from callgate._core.dtypes import dtype_named, type_text

FORMAT, FORMAT_ORBAX = 1, 2
Slices = tuple[slice, ...]


@dataclasses.dataclass(frozen=True)
class Leaf:
  """Describes an array of the carry."""

  name: str  # its path, such as "['w'][0]"
  shape: tuple[int, ...]
  dtype: str

  def __str__(self) -> str:
    return type_text(dtype_named(self.dtype), self.shape)


@dataclasses.dataclass(frozen=True)
class InOrbax:
  """Describes a checkpoint that Orbax has written."""

  paths: tuple[tuple[str, ...], ...]  # the path of each leaf
  sums: tuple[int, ...]  # the checksum of each leaf's bytes


@dataclasses.dataclass(frozen=True)
class Saved:
  """A complete checkpoint."""

  folder: Path
  step: int
  order: int  # grows from checkpoint to checkpoint
  leaves: tuple[Leaf, ...]
  orbax: InOrbax | None = None  # set if Orbax's files replace the parts
  feeds: Mapping[str, int] | None = None  # the items that each feed had given; None if not counted

  @functools.cached_property
  def parts(self) -> tuple[tuple[Path, dict[int, Slices]], ...]:
    """Returns the `.npz` files, each with the parts of leaves that no other file has.

    Raises:
      ValueError: a description is damaged.
    """
    return tuple(listed(self.folder))


def saved_in(folder: Path, step: int | None) -> Saved | None:
  """Returns the checkpoint of a folder with this step in its name; None if it is damaged."""
  try:
    about = opened((folder / "meta.json").read_bytes())
    if about["format"] not in (FORMAT, FORMAT_ORBAX) or about["step"] != step:
      return None
    leaves = tuple(Leaf(x["name"], tuple(x["shape"]), x["dtype"]) for x in about["leaves"])
    orbax = None
    if about["format"] == FORMAT_ORBAX:
      orbax = InOrbax(tuple(map(tuple, about["paths"])), tuple(about["sums"]))
    feeds = about.get("feeds")
    return Saved(
      folder, about["step"], about["order"], leaves, orbax, None if feeds is None else dict(feeds)
    )
  except Exception:  # noqa: BLE001 - damaged text may raise anything
    return None


def intact(saved: Saved) -> bool:
  """True if all parts match their checksums."""
  try:
    for file, where in saved.parts:
      for number, slices in where.items():
        _array(saved, file, number, slices)
    return is_complete(saved.parts, saved.leaves)
  except (ValueError, FileNotFoundError):  # another process has removed it meanwhile
    return False


def read(saved: Saved, number: int, wanted: Slices) -> Any:
  """Returns a part of a leaf.

  Raises:
    ValueError: a file is damaged or missing.
  """
  leaf = saved.leaves[number]
  made = np.empty([s.stop - s.start for s in wanted], dtype_named(leaf.dtype))
  missing = made.size
  for file, where in saved.parts:
    if number not in where:
      continue
    have = where[number]
    both = [
      slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(have, wanted, strict=True)
    ]
    if any(s.start >= s.stop for s in both):
      continue
    made[_within(both, wanted)] = _array(saved, file, number, have)[_within(both, have)]
    missing -= math.prod(s.stop - s.start for s in both)
  if missing > 0:
    raise ValueError(
      f"{saved.folder}: {leaf.name}: {missing} of {made.size} elements are "
      "missing; load another step"
    )
  return made


def _within(part: Sequence[slice], of: Slices) -> Slices:
  """Returns the part's slices relative to another part."""
  return tuple(slice(s.start - o.start, s.stop - o.start) for s, o in zip(part, of, strict=True))


def _array(saved: Saved, file: Path, number: int, part: Slices) -> Any:
  """Returns an array of a `.npz`, without NumPy's parser.

  NumPy parses headers by `ast`, which fails in threads of Python 3.11.
  """
  try:
    with zipfile.ZipFile(file) as archive:
      info = archive.getinfo(f"{number}.npy")
      if info.file_size > file.stat().st_size:  # before zipfile allocates that much memory
        raise ValueError(f"an array of {info.file_size} bytes is larger than the file")
      data = archive.read(info)
    long = data[6] > 1  # header of format 2 and later
    size = int.from_bytes(data[8 : 12 if long else 10], "little")
    dtype = dtype_named(saved.leaves[number].dtype)
    array = np.frombuffer(data, dtype, offset=size + (12 if long else 10))
    return array.reshape([s.stop - s.start for s in part])
  except MemoryError:
    raise
  except Exception as error:  # noqa: BLE001 - zipfile raises about ten classes for damaged bytes
    _refuse(file, error)


def _refuse(file: Path, error: Exception) -> NoReturn:
  said = f"{type(error).__name__}: {error}"
  raise ValueError(f"{file}: expected an intact file, got a damaged one: {said}") from error


def listed(folder: Path) -> Iterator[tuple[Path, dict[int, Slices]]]:
  """Yields the files of a folder, each with the parts that no other file has."""
  seen: set[tuple[int, tuple[tuple[int, int], ...]]] = set()
  for path in sorted(folder.glob("part_*.json")):
    where: dict[int, Slices] = {}
    try:
      for number, ends in opened(path.read_bytes())["parts"].items():
        key = int(number), tuple((a, b) for a, b in ends)
        if key not in seen:
          where[int(number)] = tuple(slice(a, b) for a, b in ends)
        seen.add(key)
    except Exception as error:
      if isinstance(error, FileNotFoundError) and not path.is_symlink():
        raise  # another process has removed the folder
      _refuse(path, error)
    yield path.with_suffix(".npz"), where


def is_complete(parts: Sequence[tuple[Path, Mapping[int, Slices]]], leaves: Sequence[Leaf]) -> bool:
  """True if the parts cover each element of each leaf."""
  missing = {number: math.prod(leaf.shape) for number, leaf in enumerate(leaves)}
  for _, where in parts:
    for number, slices in where.items():
      missing[number] -= math.prod(s.stop - s.start for s in slices)
  return not any(missing.values())


def sealed(about: dict[str, Any]) -> bytes:
  """Returns JSON with its checksum."""
  return json.dumps({**about, "crc32": zlib.crc32(json.dumps(about).encode())}).encode()


def opened(sealed: bytes) -> dict[str, Any]:
  """Inverts `sealed`; raises for any other bytes."""
  about = json.loads(sealed)
  if about.pop("crc32") != zlib.crc32(json.dumps(about).encode()):
    raise ValueError("the checksum differs")
  return about


def plain(array: Any) -> Any:
  """Returns an array of a dtype that NumPy's files support: the bits of any other dtype."""
  array = np.ascontiguousarray(array).reshape(np.shape(array))
  return array.view(f"u{array.itemsize}") if hasattr(ml_dtypes, array.dtype.name) else array
