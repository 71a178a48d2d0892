# SPDX-License-Identifier: Apache-2.0
"""Sinks write a channel's records to files, experiment trackers, plots and statistics.

`JSONL`, `Npy`, `Stats` and `Stream` are native: they need no Python for a record. The other sinks
are thin layers over libraries, which they import when you make one. Each has an extra of its name;
`pip install 'callgate[sinks]'` installs all of them. To write your own sink, subclass `Sink`.
"""

from __future__ import annotations

from callgate._core import shown
from callgate._tap.records import Record, TapInfo, columns
from callgate.sinks._base import Sink, SinkError
from callgate.sinks._native import JSONL, Npy, Stats, Stream
from callgate.sinks._plot import Plot
from callgate.sinks._tables import HDF5, Parquet, Zarr
from callgate.sinks._tensorboard import TensorBoard
from callgate.sinks._text import CSV, Print
from callgate.sinks._trackers import ClearML, MLflow, WandB

__all__ = [
  "CSV", "HDF5", "JSONL", "ClearML", "MLflow", "Npy", "Parquet", "Plot", "Print", "Record", "Sink",
  "SinkError", "Stats", "Stream", "TapInfo", "TensorBoard", "WandB", "Zarr", "columns",
]  # fmt: skip

shown.show(*map(globals().get, __all__))
