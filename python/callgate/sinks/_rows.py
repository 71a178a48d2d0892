"""Records of a tap gathered into columns, for sinks that write whole batches of rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from callgate._tap.records import Record, leaf_paths
from callgate.sinks._base import plain

META = {"seq": np.uint64, "time_ns": np.int64, "process": np.int32, "device": np.int32}


@dataclasses.dataclass(frozen=True, slots=True)
class Field:
  """A column: the shape and dtype of a row."""

  shape: tuple[int, ...]
  dtype: np.dtype


class Rows:
  """Rows of one tap, all of the same fields. Used by its sink alone.

  The fields are `seq`, `time_ns`, `process` and `device`; `lane` of a tap under `vmap`; and `value`
  of a lone leaf, or "value/w/0" of each leaf.
  """

  def __init__(self, first: Record) -> None:
    self.fields = fields_of(first)
    self._taken: list[tuple[Record, list[np.ndarray]]] = []
    self.nbytes = 0

  def __len__(self) -> int:
    return len(self._taken)

  def add(self, record: Record) -> None:
    """Takes a record, whose leaves must be like those of the first."""
    got = fields_of(record)
    if got != self.fields:
      raise ValueError(f"expected {_text(self.fields)} as in the first record, got {_text(got)}")
    leaves = [plain(leaf) for leaf in jax.tree.leaves(record.value)]
    self._taken.append((record, leaves))
    self.nbytes += 32 + sum(leaf.nbytes for leaf in leaves)

  def take(self) -> dict[str, np.ndarray]:
    """All rows since the last call, a stacked array for each field."""
    taken, self._taken, self.nbytes = self._taken, [], 0
    infos = [record.info for record, _ in taken]
    columns: list[Sequence[object]] = [[getattr(info, name) for info in infos] for name in META]
    if "lane" in self.fields:
      columns.append([info.lane for info in infos])
    columns += zip(*(leaves for _, leaves in taken), strict=True)
    return {
      name: np.asarray(column, field.dtype).reshape(len(taken), *field.shape)
      for (name, field), column in zip(self.fields.items(), columns, strict=True)
    }


def fields_of(record: Record) -> dict[str, Field]:
  """The fields of a record, by name."""
  fields = {name: Field((), np.dtype(dtype)) for name, dtype in META.items()}
  lane = record.info.lane
  if lane:
    fields["lane"] = Field((len(lane),), np.dtype(np.int64))
  leaves, tree = jax.tree.flatten(record.value)
  for (_, path), leaf in zip(leaf_paths(tree), leaves, strict=True):
    name = f"value/{path}" if path else "value"
    if name in fields:
      raise ValueError(f"expected leaves with names of their own, got two leaves {path!r}")
    array = plain(leaf)
    if array.dtype.kind not in "biufc":
      raise ValueError(f"expected a dtype that JAX has, got {array.dtype} of {name}")
    fields[name] = Field(array.shape, array.dtype)
  return fields


def _text(fields: dict[str, Field]) -> str:
  shown = [f"{name} {f.dtype}{list(f.shape)}" for name, f in fields.items() if name not in META]
  return ", ".join(shown) or "no leaf"
