"""Records of a stream as columns: NumPy arrays, and what Arrow makes of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from callgate._stream_records import StreamRecord

NUMBERS: Mapping[str, Any] = {
  "seq": np.uint64,
  "time_ns": np.int64,
  "process": np.int32,
  "device": np.int32,
  "lane": np.int64,
}


def columns_of(records: Sequence[StreamRecord]) -> dict[str, np.ndarray[Any, Any]]:
  """The records of one tap as arrays with one entry a record: numbers, then each leaf."""
  columns: dict[str, np.ndarray[Any, Any]] = {
    key: np.asarray([getattr(record, key) for record in records], dtype)
    for key, dtype in NUMBERS.items()
  }
  for path in records[0].leaves if records else ():
    columns[column_name(path)] = _stack(records, path)
  return columns


def table_of(columns: Mapping[str, np.ndarray[Any, Any]]) -> Any:
  """The columns as a `pyarrow.Table`."""
  try:
    import pyarrow  # pyright: ignore[reportMissingTypeStubs]
  except ImportError as error:
    raise ImportError(
      "callgate: StreamReader.table needs pyarrow: pip install callgate[arrow]"
    ) from error
  return pyarrow.table({key: _arrow_array(pyarrow, key, c) for key, c in columns.items()})


def column_name(path: str) -> str:
  """The column of a leaf: its path, "value" for a lone array, apart from the other columns."""
  column = path or "value"
  return f"{column}_" if column in NUMBERS else column


def _stack(records: Sequence[StreamRecord], path: str) -> np.ndarray[Any, Any]:
  arrays = [record.leaves.get(path) for record in records]
  kinds = {None if a is None else (a.dtype, a.shape) for a in arrays}
  if len(kinds) > 1:
    what = ", ".join(sorted("none" if k is None else f"{k[0]}{list(k[1])}" for k in kinds))
    raise ValueError(
      f"callgate: leaf {path!r} of tap {records[0].name!r} differs among records, so it makes no "
      f"column: expected one dtype and shape, got {what}"
    )
  column = np.empty((len(arrays), *records[0].leaves[path].shape), records[0].leaves[path].dtype)
  for row, array in enumerate(arrays):
    column[row] = array
  return column


def _arrow_array(pyarrow: Any, key: str, column: np.ndarray[Any, Any]) -> Any:
  if len(column) and not column.size:  # lists without elements don't say how many they are
    return pyarrow.array(column.tolist())
  try:
    array = pyarrow.array(column.reshape(-1))
  except (TypeError, NotImplementedError, pyarrow.ArrowException) as error:
    raise ValueError(
      f"callgate: Arrow has no type for column {key!r}, {column.dtype}: take columns() instead"
    ) from error
  for extent in reversed(column.shape[1:]):
    array = pyarrow.FixedSizeListArray.from_arrays(array, extent)
  return array
