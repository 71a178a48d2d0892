"""What a tap is beyond its primitive: the text that programs hold.

A program names its tap, and says of it: name, role, which operands are values, and for Python a
description in JSON (`delivery.Description` reads it). Nothing of this process.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from callgate._core import encoding
from callgate._core.encoding import Level, encode_levels
from callgate._tap.target import Tap

# As `TapInfo.transforms`, hashable: ("batch", (("batch_dims", (0, None)),)), ("jvp", ())
Transforms = tuple[tuple[str, tuple[tuple[str, Any], ...]], ...]


@dataclasses.dataclass(frozen=True)
class TapSite:
  """What is fixed about a tap when it is traced.

  Operands are the value's leaves, then logical sizes (one vector for each leaf in `logical`), then
  `where` if there is one, then `untapped` arrays that only pass through.
  """

  tree: Any
  name: str
  effect: str
  every: int
  where: bool
  roles: tuple[str, ...]
  dtypes: tuple[str | None, ...]  # of leaves that travel as another dtype
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

  @property
  def returned(self) -> int:
    """Operands that a tap in the flow of data gives back: its values and the untapped ones."""
    return self.values + self.untapped


def encode(
  site: TapSite,
  transforms: Transforms,
  levels: Sequence[Level],
  role: str,
  repeated: bool,
  returned: int = 0,
) -> str:
  """The text of `parse_tap_spec` in src/channel/tap.h; `returned`: values that are results, too."""
  leaves = jax.tree_util.tree_flatten_with_path(jax.tree.unflatten(site.tree, [0] * site.values))[0]
  paths = [jax.tree_util.keystr(path) for path, _ in leaves]
  paths += [f"logical_shape{paths[index]}" for index in site.logical]
  lines = [
    f"name={site.name}",
    f"role={role}",
    f"ordered={int(site.effect == 'ordered')}",
    f"repeated={int(repeated)}",
    f"every={site.every}",
    f"values={site.values + len(site.logical)}",
    f"returned={returned}",
    f"where={int(site.where)}",
    *(["on_device=1"] if site.on_device else []),
    *(f"path={path}" for path in paths),
    *(f"padded={index}" for index in site.logical),
    "",
    describe(site, transforms, levels),
  ]
  return "\n".join(lines)


def describe(site: TapSite, transforms: Transforms, levels: Sequence[Level]) -> str:
  """What `delivery.Description` reads."""
  tree = jax.tree.structure(((jax.tree.unflatten(site.tree, [0] * site.values),), {}))
  description = {
    "spec": encoding.encode(tree, jax.tree.structure(None), ()),
    "values": site.values,
    "sizes": [size for size, _ in levels],
    "dtypes": site.dtypes,
    "logical": site.logical,
    "transforms": transforms,
  }
  if site.on_device:
    description["on_device"] = True
  return json.dumps(description, separators=(",", ":"))


def send_from_host(
  tap: Tap, spec: str, levels: Sequence[Level], count: int, arrays: Sequence[Any]
) -> None:
  """Sends a record from Python: for programs that can't call the runtime.

  Args:
    tap: where to.
    spec: the call site's text.
    levels: its batch levels.
    count: operands that make up the record; the rest passes through.
    arrays: the operands.
  """
  contiguous = [np.array(array, order="C") for array in arrays[:count]]  # copies, never views
  tap.handle.send(spec, encode_levels(levels), -1, contiguous)
