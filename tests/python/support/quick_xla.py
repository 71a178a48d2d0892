# SPDX-License-Identifier: Apache-2.0
"""Options with which XLA compiles quickly: for programs whose arithmetic is not what is tested."""

from __future__ import annotations

import os

import jax
import pytest

QUICKLY_COMPILED: dict[str, int | bool] = {
  "xla_backend_optimization_level": 0,
  "xla_cpu_parallel_codegen_split_count": 1,
}
if jax.__version_info__ < (0, 11):  # later XLA has no other emitters
  QUICKLY_COMPILED["xla_cpu_use_fusion_emitters"] = False


def use() -> None:
  """Has this process compile all programs so; the processes that it starts keep the defaults."""
  flags = [f"--{name}={str(value).lower()}" for name, value in QUICKLY_COMPILED.items()]
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv("XLA_FLAGS", " ".join([os.environ.get("XLA_FLAGS", ""), *flags]))
    jax.devices()  # reads them
