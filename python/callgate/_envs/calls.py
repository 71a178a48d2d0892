# SPDX-License-Identifier: Apache-2.0
"""Calls of environments: one for all of them, or one for each worker's share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from callgate._call import primitive, shapes
from callgate._call.site import BoundCall, CallSite
from callgate._core.errors import GateDefinitionError
from callgate._envs import hosts
from callgate._envs.hosts import LanesMethod, Levels
from callgate._gate.callee import GateCallee
from callgate._gate.options import GateOptions
from callgate._jax import tracing
from callgate._places.workers import Workers
from callgate._runtime import config

SHARDING = (
  "expected a sharding that splits only lanes, such as NamedSharding(mesh, PartitionSpec('d'))"
)


class EnvGate(GateCallee):
  """A method of a `Host` as a gate. With workers each argument has a leading axis of shares.

  Lanes of `jax.vmap` become rows. The rows of an environment's copies are consecutive, so that a
  device or a worker has all copies of its environments. This process makes its environments while
  the program is traced. A worker, or one of several devices, makes them at the first reset.
  """

  kind = "envs"

  def __init__(self, function: LanesMethod, options: GateOptions, layout: EnvLayout) -> None:
    self._layout, self._instances = layout, function.instances
    super().__init__(function, dataclasses.replace(options, vmap=self._of_lanes))
    self.lane_rule = self._of_lane
    self.no_derivatives = (
      f"{layout.label}: environments have no derivatives; use "
      "env.step(jax.lax.stop_gradient(actions))"
    )

  def _prepare(self, levels: Levels, size: int) -> None:
    """Makes the environments for so many lanes around the levels, if this process has them."""
    total = hosts.copies_of(levels) * size
    if total * self._layout.count > hosts.MOST:
      raise GateDefinitionError(
        f"{self._layout.label}: under jax.vmap of {size} lanes: expected at most {hosts.MOST} "
        f"environments, got {total} times {self._layout.count}"
      )
    if self.remote is None and self._layout.sharding is None:
      self.place.run(lambda: self._instances.get().prepare(total))

  def _of_lanes(
    self, size: int, batched: Sequence[Any], lanes: Any, *args: Any, levels: Levels, **static: Any
  ) -> tuple[Any, Any]:
    """The rule of `jax.vmap`: one call for all lanes' environments; the host gets their numbers."""
    assert not batched[0]
    axis = lanes.ndim - 1  # the axis of the rows; with workers shares come before

    def merged(x: Any, flag: bool) -> Any:
      x = jnp.moveaxis(x, 0, axis + 1) if flag else jnp.expand_dims(x, axis + 1)
      x = jnp.broadcast_to(x, (*x.shape[: axis + 1], size, *x.shape[axis + 2 :]))
      shape = *x.shape[:axis], x.shape[axis] * size, *x.shape[axis + 2 :]
      return self._layout.reshaped(x, *shape)

    def parted(x: Any) -> Any:
      rows = x.shape[axis] // size
      x = self._layout.reshaped(x, *x.shape[:axis], rows, size, *x.shape[axis + 1 :])
      return jnp.moveaxis(x, axis + 1, 0)

    given = self._layout.split(jax.tree.map(merged, args, tuple(batched[1:])))
    self._prepare(levels, size)
    found = self(lanes, *given, levels=(*levels, (size, size)), **static)
    found = jax.tree.map(parted, found)
    return found, jax.tree.map(lambda _: True, found)

  def _of_lane(
    self, operands: Sequence[Any], call: BoundCall, lane: Any, size: int
  ) -> Sequence[Any]:
    """Calls for one lane, when the program runs lanes one after the other."""
    (lanes, *args), _ = jax.tree.unflatten(call.site.in_tree, operands)
    static = dict(call.site.static)
    levels: Levels = static.pop("levels")
    self._prepare(levels, size)
    numbers = lanes + lane * np.int32(self._layout.count * hosts.copies_of(levels))
    return jax.tree.leaves(self(numbers, *args, levels=(*levels, (1, size)), **static))

  def bind(self, site: CallSite, leaves: Sequence[Any]) -> Any:
    if not isinstance(self.run_on, Workers):
      return super().bind(site, leaves)
    shares = [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in leaves]
    shapes.check_call(self, site, shares)
    self.check_call(site, shares)
    level = leaves[0].shape[0], (True,) * len(leaves)
    flat = primitive.bind(*leaves, call=BoundCall(self, site, (level,)))
    return jax.tree.unflatten(site.out_tree, flat)


@dataclasses.dataclass(frozen=True)
class EnvLayout:
  """The placement of environments on devices and workers.

  Attributes:
    label: the beginning of messages.
    count: the number of environments.
    sharding: splits them over devices; None for one device.
    workers: the number of workers; 0 for none.
    together: True if a device's environments are one vector environment, on one worker.
  """

  label: str
  count: int
  sharding: jax.sharding.NamedSharding | None
  workers: int
  together: bool = False

  @classmethod
  def checked(
    cls, label: str, count: int, sharding: Any, workers: int, *, together: bool = False
  ) -> EnvLayout:
    if sharding is not None:
      if not isinstance(sharding, jax.sharding.NamedSharding):
        raise GateDefinitionError(f"{label}: sharding: {SHARDING}, got {sharding!r}")
      if not sharding.spec or sharding.spec[0] is None or any(sharding.spec[1:]):
        raise GateDefinitionError(f"{label}: sharding: {SHARDING}, got {sharding}")
    made = cls(label, count, sharding, workers, together)
    if count % made.devices and not together:
      raise GateDefinitionError(
        f"{label}: sharding: expected n, the number of environments, to be a multiple of the "
        f"number of devices, {made.devices}, got n={count}"
      )
    return made

  @property
  def axes(self) -> tuple[str, ...]:
    """The mesh's axes that split the environments."""
    first: Any = () if self.sharding is None else self.sharding.spec[0]
    return (first,) if isinstance(first, str) else tuple(first)

  @property
  def devices(self) -> int:
    """The number of parts into which the environments are split."""
    if self.sharding is None:
      return 1
    return int(np.prod([self.sharding.mesh.shape[axis] for axis in self.axes]))

  @property
  def rows(self) -> int:
    """The number of environments of the call being traced."""
    return self.count // self.devices if self.is_local() else self.count

  def is_local(self) -> bool:
    """True if a program is traced for one device of the mesh, in a `jax.shard_map`."""
    return bool(self.axes) and tracing.region_axes().issuperset(self.axes)

  def lanes(self) -> Any:
    """Returns the numbers of the environments of the call being traced."""
    if not self.is_local():
      return jnp.arange(self.count, dtype=np.int32)
    part = self.count // self.devices
    return jax.lax.axis_index(self.axes) * part + jnp.arange(part, dtype=np.int32)

  def call(
    self, here: Callable[..., Any], there: Callable[..., Any] | None, *args: Any, **static: Any
  ) -> Any:
    """Calls one of two gates with pytrees of arrays that have a row for each lane, lanes first."""
    if there is None or config.engine() == "jax":
      return self.split(here(*self.split(args), **static))
    local = self.is_local()
    parts = 1 if local else self.devices
    rows = args[0].shape[0] // parts
    shares, share = self._shares(rows)

    def grouped(x: Any, fill: int | None = None) -> Any:
      x = self.reshaped(x, parts, rows, *x.shape[1:])
      if more := shares * share - rows:
        last = x[:, :1] if fill is None else jnp.full_like(x[:, :1], fill)
        x = jnp.concatenate([x, *([last] * more)], axis=1)
      return self.reshaped(x, parts * shares, share, *x.shape[2:])

    def flat(x: Any) -> Any:
      x = self.reshaped(x, parts, shares * share, *x.shape[2:])[:, :rows]
      return self.reshaped(x, parts * rows, *x.shape[2:])

    # Rows that only fill up a share get a number that no environment has.
    lanes, *rest = args
    given = (grouped(lanes, hosts.NONE), *jax.tree.map(grouped, rest))
    return self.split(jax.tree.map(flat, there(*self.split(given), **static)))

  def _shares(self, rows: int) -> tuple[int, int]:
    """Returns how many workers share a device's environments, and the size of the largest share."""
    if self.together:
      return 1, rows
    shares = self.workers if self.sharding is not None else min(self.workers, rows)
    return shares, -(-rows // shares)

  def worker_of(self, lane: int) -> int:
    """Returns the index of the worker that has an environment."""
    rows = self.count // self.devices
    return lane % rows // self._shares(rows)[1]

  def split(self, tree: Any) -> Any:
    """Splits a pytree over the devices, if the program is traced for all of them."""
    if self.sharding is None or self.is_local():
      return tree
    put = jax.sharding.reshard if self._explicit else jax.lax.with_sharding_constraint
    return jax.tree.map(lambda x: put(x, self._rows), tree)

  @property
  def _rows(self) -> jax.sharding.NamedSharding:
    assert self.sharding is not None
    spec = jax.sharding.PartitionSpec(self.sharding.spec[0])
    return jax.sharding.NamedSharding(self.sharding.mesh, spec)

  @property
  def _explicit(self) -> bool:
    if self.sharding is None:
      return False
    mesh = self.sharding.mesh
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    return any(kinds[axis] == jax.sharding.AxisType.Explicit for axis in self.axes)

  def reshaped(self, x: Any, *shape: int) -> Any:
    """Reshapes rows of environments; each device keeps its own."""
    if not self._explicit or self.is_local():
      return x.reshape(shape)
    return jax.lax.reshape(self.split(x), shape, out_sharding=self._rows)
