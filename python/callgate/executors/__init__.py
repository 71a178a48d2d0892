# SPDX-License-Identifier: Apache-2.0
"""Executors for `callgate.gate(run_on=)` over engines that have none of their own.

`concurrent.futures`, Dask, loky and mpi4py have executors, which `run_on=` takes as they are.
"""

from __future__ import annotations

from callgate._core import shown
from callgate.executors._ray import RayExecutor, ray

__all__ = ["RayExecutor", "ray"]

shown.show(*map(globals().get, __all__))
