# SPDX-License-Identifier: Apache-2.0
"""Sinks, to which a channel's records go: files, trackers, plots, statistics.

`JSONL`, `Npy`, `Stats` and `Stream` are native: the channel hands them records without Python. The
others are thin layers over libraries, which are imported when a sink is made; each has an extra of
its name, and `pip install 'callgate[sinks]'` brings them all. A sink of your own is a subclass of
`Sink`.
"""

from __future__ import annotations

from callgate._core import shown
from callgate._tap.records import Record, TapInfo, columns
from callgate.sinks._base import Sink, SinkError
from callgate.sinks._native import JSONL, Npy, Stats, Stream
from callgate.sinks._plot import Plot
from callgate.sinks._tables import HDF5, Parquet, Zarr
from callgate.sinks._text import CSV, Print
from callgate.sinks._trackers import ClearML, MLflow, TensorBoard, WandB

__all__ = [
  "CSV", "HDF5", "JSONL", "ClearML", "MLflow", "Npy", "Parquet", "Plot", "Print", "Record", "Sink",
  "SinkError", "Stats", "Stream", "TapInfo", "TensorBoard", "WandB", "Zarr", "columns",
]  # fmt: skip

shown.show(*map(globals().get, __all__))
