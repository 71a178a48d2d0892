# SPDX-License-Identifier: Apache-2.0
"""Describes a tap's call site, and encodes it for programs, without objects of this process."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from callgate._core import attributes, encoding, exact
from callgate._core.levels import Numbered, encode_levels
from callgate._tap import kinds
from callgate._tap.records import leaf_paths

# As `TapInfo.transforms`, hashable: ("batch", (("batch_dims", (0, None)),)), ("jvp", ())
Transforms = tuple[tuple[str, tuple[tuple[str, Any], ...]], ...]
Arrays = Sequence[Any]


@dataclasses.dataclass(frozen=True)
class TapSite:
  """The properties of a tap that are fixed when it is traced.

  Operands are the value's leaves, then logical sizes (one vector for each leaf in `logical`), then
  `where` if there is one, then the number of the lane if levels are `numbered` (`levels.Numbered`),
  then `untapped` arrays that only pass through.
  """

  tree: Any = dataclasses.field(compare=False)
  name: str
  dtypes: tuple[str | None, ...]  # for each leaf: its own dtype, if it is sent in another one
  effect: str = "io"
  every: int = 1
  where: bool = False
  roles: tuple[str, ...] = ("primal",)
  logical: tuple[int, ...] = ()
  untapped: int = 0
  numbered: tuple[Numbered, ...] = ()
  whole: bool = False  # lanes stay together: one record has all lanes of a vmap
  transposed: bool = False  # the value is itself linear, so its cotangent is sent instead
  # "shard", "gather", a rule's text or a function.
  sharding: Any = dataclasses.field(default="gather", compare=False)
  replicas: str = "once"
  on_device: bool = False  # consumers get jax.Arrays on the program's device
  pmapped: bool = False  # inside a `jax.pmap`
  kind: str | None = None  # "image" or "text"
  fields: kinds.Fields | None = None  # a text's format, whose fields the leaves fill
  kept: Any = None  # programs keep it (`execution.Watcher`)

  # Stands for the tree and the function in comparisons.
  same: exact.Exact = dataclasses.field(init=False, repr=False)

  def __post_init__(self) -> None:
    parts = exact.exact_tree(self.tree), exact.exact(self.sharding)
    object.__setattr__(self, "same", exact.exact(parts))

  @property
  def values(self) -> int:
    """The number of leaves of the tapped value."""
    return len(self.dtypes)

  @property
  def sent(self) -> int:
    """The number of operands that make a record."""
    return self.values + len(self.logical) + self.where + bool(self.numbered)


def encode(
  site: TapSite,
  transforms: Transforms,
  role: str,
  repeated: bool,
  returned: int = 0,
  *,
  stacked: dict[str, Any] | None = None,
  portable: bool = False,
) -> dict[str, Any]:
  """Returns a tap's attributes in a program (`TapSpec::of` in src/channel/tap.h).

  `repeated`: it runs again in the backward pass. `returned`: the number of values that are also
  results. `stacked`: from `stacked_by_pmap`. `portable`: for a program for other processes, as in
  `encoding.encode`.
  """
  paths = [path for path, _ in leaf_paths(site.tree)]
  paths += [f"logical_shape{paths[index]}" for index in site.logical]
  return {
    "spec": describe(site, transforms, stacked, portable=portable),
    "tap": {
      "name": site.name, "role": role, "ordered": np.bool_(site.effect == "ordered"),
      "repeated": np.bool_(repeated), "every": np.int64(site.every),
      "returned": np.int64(returned), "where": np.bool_(site.where),
      "on_device": np.bool_(site.on_device), "paths": attributes.listed(paths),
    },
    "padded": attributes.listed({"leaf": np.int64(index)} for index in site.logical),
  }  # fmt: skip


def send(tap: Any, site: TapSite, arrays: Arrays) -> None:
  """Sends a record from Python."""
  held = encode(site, transforms=(), role="primal", repeated=False)
  held["batch"] = encode_levels(())
  tap.handle.send(repr((held["spec"], held["tap"])), held, -1, [*arrays])


def _arguments(site: TapSite) -> Any:
  """Returns the structure of a call with the value."""
  return jax.tree.structure(((jax.tree.unflatten(site.tree, [0] * site.values),), {}))


def kept(site: TapSite) -> exact.Exact:
  """Returns an object that keeps the description's named values alive."""
  return exact.exact_tree(_arguments(site))


def stacked_by_pmap(devices: Sequence[int], shapes: Sequence[Sequence[int]]) -> dict[str, Any]:
  """Returns the shards of a value under `jax.pmap`: the whole has the devices' values stacked.

  `devices` are their ids in the order of the stack; `shapes` are those of one device's leaves.
  """
  count = len(devices)
  leaves = [
    {"shape": [count, *shape], "counts": [count, *(1 for _ in shape)], "tile": [*range(count)]}
    for shape in shapes
  ]
  return {"devices": [*devices], "leaves": leaves}


def describe(
  site: TapSite, transforms: Transforms, stacked: dict[str, Any] | None = None, *,
  portable: bool = False,
) -> str:  # fmt: skip
  """Returns the text that `delivery.TapDescription` reads."""
  spec = encoding.encode(_arguments(site), jax.tree.structure(None), (), portable=portable)
  description: dict[str, Any] = {
    "spec": spec, "values": site.values,
    "dtypes": site.dtypes, "logical": site.logical, "transforms": transforms,
  } | ({"on_device": True} if site.on_device else {})  # fmt: skip
  if stacked is not None:
    description["stacked"] = stacked
  if site.kind is not None:
    description |= {"kind": site.kind}
  if site.fields is not None:
    description |= {"fields": site.fields}
  return json.dumps(description, separators=(",", ":"))
