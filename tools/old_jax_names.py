# SPDX-License-Identifier: Apache-2.0
"""Names that JAX's tests of 2020 to 2023 import, and that JAX has elsewhere or no longer."""

from __future__ import annotations

import contextlib
import importlib
import math
import sys
import types
from typing import Any

import jax
import jax.experimental
from jax import ad_checkpoint
from jax._src import test_util, util, xla_bridge
from jax._src.lib import xla_client
from jax.interpreters import pxla

COMPAT = ("host_callback", "host_callback_2023", "sharded_jit")


def put_in(compat: str) -> None:
  """Puts a module of `callgate.compat` in the place of JAX's, and the other names in theirs.

  Args:
    compat: one of COMPAT.
  """
  module = importlib.import_module(f"callgate.compat.{compat}")
  _put("jax.experimental." + compat.removesuffix("_2023"), module)
  if compat == "sharded_jit":  # imported from jax.experimental itself; it ran on TPUs alone
    test_util.device_under_test = lambda: "tpu"
    _default(pxla, "ShardedDeviceArray", jax.Array)
    for name in ("sharded_jit", "with_sharding_constraint", "PartitionSpec"):
      setattr(jax.experimental, name, getattr(module, name))
  _default(type(jax.config), "FLAGS", property(lambda config: config))
  # The number of devices comes from XLA_FLAGS.
  _default(test_util, "set_host_platform_device_count", lambda _: contextlib.nullcontext())
  _default(test_util, "cases_from_list", list)
  promotion = {"jax_numpy_dtype_promotion": "standard"}
  test_util.JaxTestCase._default_global_config |= promotion
  _default(xla_client, "ops", types.SimpleNamespace())
  ad_checkpoint.checkpoint = jax.checkpoint
  _put("jax.api", jax)
  _put("jax.test_util", test_util)
  _default(importlib.import_module("jax.lib"), "xla_bridge", xla_bridge)
  _default(util, "prod", math.prod)
  for name, content in {"config": {"config": jax.config}, "util": {"prod": math.prod}}.items():
    other: Any = types.ModuleType(f"jax.{name}")
    other.__dict__.update(content)
    sys.modules[other.__name__] = other


def _default(owner: Any, name: str, value: Any) -> None:
  if not hasattr(owner, name):
    setattr(owner, name, value)


def _put(name: str, module: Any) -> None:
  sys.modules[name] = module
  owner, _, last = name.rpartition(".")
  setattr(sys.modules[owner], last, module)
