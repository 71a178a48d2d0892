# SPDX-License-Identifier: Apache-2.0
"""Executors for `callgate.gate(run_on=)`, for engines that have no executor of their own.

`run_on=` takes the executors of `concurrent.futures`, Dask, loky and mpi4py directly.
"""

from __future__ import annotations

from callgate._core import shown
from callgate.executors._ray import RayExecutor, ray

__all__ = ["RayExecutor", "ray"]

shown.show(*map(globals().get, __all__))
