# SPDX-License-Identifier: Apache-2.0
"""Describes a tap beyond its primitive, and as programs hold it: with nothing of this process."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from callgate._core import attributes, encoding
from callgate._tap.records import leaf_paths

# As `TapInfo.transforms`, hashable: ("batch", (("batch_dims", (0, None)),)), ("jvp", ())
Transforms = tuple[tuple[str, tuple[tuple[str, Any], ...]], ...]
Arrays = Sequence[Any]


@dataclasses.dataclass(frozen=True)
class TapSite:
  """Holds what is fixed about a tap when it is traced.

  Operands are the value's leaves, then logical sizes (one vector for each leaf in `logical`), then
  `where` if there is one, then `untapped` arrays that only pass through.
  """

  tree: Any
  name: str
  dtypes: tuple[str | None, ...]  # of leaves that travel as another dtype
  effect: str = "io"
  every: int = 1
  where: bool = False
  roles: tuple[str, ...] = ("primal",)
  logical: tuple[int, ...] = ()
  untapped: int = 0
  whole: bool = False  # lanes stay together: records of all lanes of a vmap
  transposed: bool = False  # where the value is itself linear, its cotangent is sent instead
  sharding: Any = "gather"  # "shard", "gather", a rule's text or a function
  replicas: str = "once"
  on_device: bool = False  # consumers get jax.Arrays where the program ran
  kept: Any = None  # programs keep it (`dispatch.ask_before_execution`)

  @property
  def values(self) -> int:
    """Leaves of the tapped value."""
    return len(self.dtypes)


def encode(
  site: TapSite,
  transforms: Transforms,
  role: str,
  repeated: bool,
  returned: int = 0,
) -> dict[str, Any]:
  """Returns what a program holds of a tap (`TapSpec::of` in src/channel/tap.h).

  `repeated`: it runs again in the backward pass. `returned`: how many values are results, too.
  """
  paths = [path for path, _ in leaf_paths(site.tree)]
  paths += [f"logical_shape{paths[index]}" for index in site.logical]
  return {
    "spec": describe(site, transforms),
    "tap": {
      "name": site.name, "role": role, "ordered": np.bool_(site.effect == "ordered"),
      "repeated": np.bool_(repeated), "every": np.int64(site.every),
      "returned": np.int64(returned), "where": np.bool_(site.where),
      "on_device": np.bool_(site.on_device), "paths": attributes.listed(paths),
    },
    "padded": attributes.listed({"leaf": np.int64(index)} for index in site.logical),
  }  # fmt: skip


def describe(site: TapSite, transforms: Transforms) -> str:
  """Returns what `delivery.Description` reads."""
  tree = jax.tree.structure(((jax.tree.unflatten(site.tree, [0] * site.values),), {}))
  description = {
    "spec": encoding.encode(tree, jax.tree.structure(None), ()), "values": site.values,
    "dtypes": site.dtypes, "logical": site.logical, "transforms": transforms,
  } | ({"on_device": True} if site.on_device else {})  # fmt: skip
  return json.dumps(description, separators=(",", ":"))
