# SPDX-License-Identifier: Apache-2.0
"""`jax.experimental.sharded_jit` of 2020-21: a jit that splits its arguments by counts.

```python
import jax.numpy as jnp
from callgate.compat.sharded_jit import PartitionSpec, sharded_jit

add = sharded_jit(lambda x, y: x + y, in_parts=(PartitionSpec(1), None), out_parts=PartitionSpec(1))
assert add(jnp.ones(4), jnp.ones(4)).tolist() == [2.0] * 4
```

This implementation uses `jax.jit` with shardings, so it runs on every platform. It traces and
compiles a function once for each kind of arguments. Any thread may call it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
from jax.core import Tracer

from callgate._core import shown
from callgate._jax import tracing
from callgate._jax.tracing import jaxpr_as_fun
from callgate.compat import _sharded_jit as _parts
from callgate.compat._sharded_jit import PartitionSpec, Stated, part_of, with_sharding_constraint

__all__ = ["PartitionSpec", "sharded_jit", "with_sharding_constraint"]
_Run = Callable[[list[Any]], Any]  # a program with flat arguments


def sharded_jit(
  fun: Callable[..., Any], in_parts: Any, out_parts: Any, num_partitions: int | None = None,
  local_in_parts: Any = None, local_out_parts: Any = None, local_num_partitions: int | None = None,
  static_argnums: int | Sequence[int] = (),
) -> Callable[..., Any]:  # fmt: skip
  """Compiles a function like `jax.jit`, with arguments and results split over several devices.

  The number of partitions comes from `num_partitions`, the specs and the constraints inside the
  function, which must agree. The program runs on the first devices of this process. If a process
  has fewer devices than there are partitions, it runs on all devices of all processes. Each process
  then passes its part of each argument, and gets its part of each result, on its own devices. The
  function itself sees whole arrays, as does a surrounding program (`jit`, `grad`, `vmap`, loops).

  Args:
    fun: a function of arrays and pytrees of arrays.
    in_parts: the split of the arguments: a `PartitionSpec` for all, None (replicated), or a tuple
      with an entry for each non-static argument, each a pytree prefix of it. A spec has a count for
      each dimension of its arrays.
    out_parts: the split of the results, in the same form.
    num_partitions: the number of devices, if nothing else determines it.
    local_in_parts: with several processes, how a process's part of the arguments is split over its
      own devices. It follows from the devices, and is checked if given.
    local_out_parts: the same for the results.
    local_num_partitions: the number of devices of each process. Needed across processes if all
      arguments and results are replicated.
    static_argnums: positions of static arguments: hashable values instead of arrays.

  Returns:
    The compiled function. Its results are `jax.Array`s, split as `out_parts` says; across
    processes, the process's tiles of them.

  Raises:
    ValueError: here or in a call: partitions disagree with each other, with the arrays or with the
      devices; there are too few arguments for `static_argnums`; or a static argument is not
      hashable.
    NotImplementedError: in a call with keyword arguments.
  """
  static = (static_argnums,) if isinstance(static_argnums, int) else tuple(static_argnums)
  local = Stated(local_in_parts, local_out_parts, local_num_partitions, "local_")
  split = _ShardedJit(fun, Stated(in_parts, out_parts, num_partitions), local, static)

  @functools.wraps(fun)
  def wrapped(*args: Any, **kwargs: Any) -> Any:
    if kwargs:
      got = f"got {', '.join(kwargs)}; pass them by position"
      raise NotImplementedError(f"sharded_jit over kwargs not yet supported: {got}")
    return split.call(args)

  return wrapped


class _ShardedJit:
  """The function, the parts and the programs of one `sharded_jit`."""

  def __init__(
    self, fun: Callable[..., Any], whole: Stated, local: Stated, static: tuple[int, ...]
  ) -> None:
    self.fun, self.whole, self.local, self.static = fun, whole, local, static
    self.name = getattr(fun, "__name__", "sharded_jit")
    self._programs: dict[Hashable, _Run] = {}

  def call(self, args: tuple[Any, ...]) -> Any:
    fixed = self._fixed(args)
    given = tuple(arg for i, arg in enumerate(args) if i not in fixed)
    leaves, tree = jax.tree.flatten(given)
    types = [jax.typeof(leaf) for leaf in leaves]
    # In a surrounding program arrays are whole even across processes, and its mesh may decide.
    inside = any(isinstance(leaf, Tracer) for leaf in leaves)
    static = tuple((i, type(value), value) for i, value in sorted(fixed.items()))
    total = len(args)

    def flat(*leaves: Any) -> Any:
      rest = iter(jax.tree.unflatten(tree, leaves))
      return self.fun(*(fixed[i] if i in fixed else next(rest) for i in range(total)))

    key = (tree, *map(str, types), static, inside, tracing.trace_key())
    if (run := self._programs.get(key)) is None:
      run, lasting = self._program(flat, given, types, inside)
      if lasting:
        self._programs[key] = run
    return run(leaves)

  def _fixed(self, args: tuple[Any, ...]) -> dict[int, Any]:
    """Returns the static arguments by position."""
    if not all(-len(args) <= i < len(args) for i in self.static):
      only = f"{self.name} was called with only {len(args)} positional arguments"
      raise ValueError(f"sharded_jit: static_argnums={self.static}, but {only}")
    fixed = {i % len(args): args[i] for i in self.static}
    for i, value in fixed.items():
      try:
        hash(value)
      except TypeError as error:
        what = f"static argument {i} of {self.name}: expected a hashable value, got {value!r}"
        raise ValueError(f"sharded_jit: {what}") from error
    return fixed

  def _program(
    self, flat: Callable[..., Any], given: tuple[Any, ...], types: Sequence[Any], inside: bool
  ) -> tuple[_Run, bool]:
    """Makes a runner of `flat` for such arguments; True if reusable: it closes over no tracer."""
    whole, local = self.whole, self.local
    parts = _parts.flat_parts(whole.in_parts, given, "in_parts")
    shapes = [t.shape for t in types]
    _parts.check(parts, shapes, "in_parts", padded=True)
    if whole.said is not None and not inside:  # otherwise arrays are whole
      devices = _parts.devices_of(whole.said, local, whole.split)
      if _parts.is_shared(devices):
        shapes = [part_of(devices, p).whole_shape(s) for p, s in zip(parts, shapes, strict=True)]
    _parts.check(parts, shapes, "in_parts")
    flat.__name__ = self.name
    arguments = [
      jax.ShapeDtypeStruct(shape, t.dtype, weak_type=t.weak_type)
      for shape, t in zip(shapes, types, strict=True)
    ]
    closed, info = jax.make_jaxpr(flat, return_shape=True)(*arguments)  # with constants
    out_parts = _parts.flat_parts(whole.out_parts, info, "out_parts")
    _parts.check(out_parts, [result.shape for result in jax.tree.leaves(info)], "out_parts")
    count = self._count(closed.jaxpr)
    lasting = not any(isinstance(const, Tracer) for const in closed.consts)
    if count is None or tracing.in_manual_region():
      # Replicated on the devices of the surrounding program. Parts aren't split again.
      return self._runner(closed, info, None, inside, False), lasting
    devices = _parts.devices_of(count, local, whole.split)
    ins, outs = (
      [part_of(devices, p) for p in parts],
      [part_of(devices, p) for p in out_parts],
    )
    _parts.check_stated(ins, local.in_parts, given, "local_in_parts")
    _parts.check_stated(outs, local.out_parts, info, "local_out_parts")
    shared = _parts.is_shared(devices)
    if shared and not inside and not lasting:
      got = "got one that is being traced: pass it as an argument, or transform inside"
      expected = f"expected {self.name} to close over values, {got}"
      raise ValueError(f"sharded_jit across processes: {expected} of sharded_jit")
    return self._runner(closed, info, (ins, outs), inside, shared), lasting

  def _count(self, jaxpr: Any) -> int | None:
    """Returns the number of partitions; None if only a surrounding program may determine it."""
    count = self.whole.said
    for inside, who in _parts.counts_inside(jaxpr):
      if count is not None and inside != count:
        check = "check outer sharded_jit and/or other with_sharding_constraint calls."
        expected = f"expected number of partitions: {count}. If these partitions look right"
        raise ValueError(f"{who} (total partitions: {inside}) doesn't match {expected}, {check}")
      count = inside
    return 1 if count is None and self.local.said is not None else count

  def _runner(
    self, closed: Any, info: Any, parts: tuple[Sequence[_parts.LocalPart], ...] | None,
    inside: bool, shared: bool,
  ) -> _Run:  # fmt: skip
    """Returns a runner of the traced program; without `parts` arguments keep their places."""
    program, tree = jaxpr_as_fun(closed), jax.tree.structure(info)

    def flat(*leaves: Any) -> list[Any]:
      return program(*leaves)

    flat.__name__ = flat.__qualname__ = self.name  # for profiles and texts
    if parts is None:
      compiled = jax.jit(flat)
      return lambda leaves: jax.tree.unflatten(tree, compiled(*leaves))
    ins, outs = parts
    shardings, out_shardings = tuple(part.whole for part in ins), [part.whole for part in outs]
    compiled = jax.jit(flat, in_shardings=shardings, out_shardings=out_shardings)

    def place(leaf: Any, part: _parts.LocalPart) -> Any:
      if inside and (shared or isinstance(leaf, Tracer)):
        return leaf
      return part.to_program(leaf) if shared else _parts.put(leaf, part.whole)

    def run(leaves: list[Any]) -> Any:
      results = compiled(*map(place, leaves, ins))
      if shared and not inside:
        results = [part.to_process(whole) for part, whole in zip(outs, results, strict=True)]
      return jax.tree.unflatten(tree, results)

    return run


shown.show(*map(globals().get, __all__))
