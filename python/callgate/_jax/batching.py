# SPDX-License-Identifier: Apache-2.0
"""JAX's vmap: lanes of programs, and the axes of lanes."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Generator, Sequence
from typing import Any

from jax._src import core as _core
from jax._src.interpreters import batching as _batching
from jax._src.interpreters import mlir as _mlir
from jax.interpreters import ad as _ad

from callgate import _part
from callgate._jax import tracing, walk


def names_axis(jaxpr: Any) -> bool:
  """Returns True if a jaxpr contains a collective, or another name of a mapped axis (0.10 to 0.12).

  Most of these have an effect, which a `jax.shard_map` removes for its own axes. `ppermute` and
  similar ones have a parameter instead.
  """

  def inside(eqn: Any) -> Sequence[Any]:
    return [] if eqn.primitive.name == "shard_map" else walk.subjaxprs(eqn)

  return any(
    eqn.params.get("axis_name") is not None
    or any(isinstance(effect, _core.NamedAxisEffect) for effect in eqn.effects)
    for eqn in walk.equations(jaxpr, inside)
  )


def always_batched(primitive: Any, rule: Callable[..., Any]) -> None:
  """Makes vmap call `rule(operands, dims, size=..., **params)` even if no operand has its axis.

  JAX calls public rules only if an operand has the axis (0.10 to 0.12).
  """
  _batching.fancy_primitive_batchers[primitive] = lambda axis_data, operands, dims, **params: rule(
    operands, dims, size=axis_data.size, **params
  )


def lane_aval(axis_data: Any, value: Any, dim: int | None) -> Any:
  """Returns the abstract value of a lane of an array (0.10 to 0.12); no public name."""
  aval = _core.typeof(value)
  return aval if dim is None else _core.mapped_aval(axis_data.size, dim, aval)


def to_lanes(axis_data: Any, value: Any) -> Any:
  """Repeats the value for each lane, on axis 0 (0.10 to 0.12); no public name."""
  return _batching.broadcast(value, axis_data.size, 0, axis_data.explicit_mesh_axis)


def split_along(axis: Any, value: Any) -> Any:
  """In an explicitly sharded program, splits the value's first axis along this mesh axis."""
  aval = _core.typeof(value)
  if not tracing.is_explicit([aval]) or tracing.spec_of(aval)[0] == axis:
    return value
  spec = [axis, *tracing.spec_of(aval)[1:]]
  return tracing.reshard_as(tracing.with_spec(aval, [aval], spec), value)


@contextlib.contextmanager
def in_lane(axis_data: Any) -> Generator[None]:
  """Traces a lane's function in the block, which may name the axis (0.10 to 0.12)."""
  with (
    _core.extend_axis_env_nd([(axis_data.name, axis_data.size)]),
    _core.add_spmd_axis_names(axis_data.spmd_name),
    _core.add_explicit_mesh_axis_names(axis_data.explicit_mesh_axis),
  ):
    yield


def axes_here() -> Callable[[], Any]:
  """Returns a maker of contexts with the axis names of this place (0.10 to 0.12).

  For derivative rules, which JAX traces later, outside the lane.
  """
  sizes = tuple(_core.get_axis_env().axis_sizes.items())
  return lambda: _core.extend_axis_env_nd(sizes)


def batched_at(
  closed: Any, axis_data: Any, dims: Sequence[int | None], result_dims: Sequence[int]
) -> Any:
  """Returns a jaxpr of lanes on these axes of its arguments and results (0.10 to 0.12)."""
  return _batching.batch_jaxpr_axes(closed, axis_data, list(dims), list(result_dims))[0]


# The identity on values of a `scan` step that is a lane, while marks are made.
lane_p = tracing.Primitive("callgate_lane")
lane_p.def_impl(lambda x: x)
lane_p.def_abstract_eval(lambda x: x)
_ad.deflinear2(lane_p, lambda ct, _: [ct if isinstance(ct, _ad.Zero) else lane_p.bind(ct)])
_batching.primitive_batchers[lane_p] = lambda args, dims: (lane_p.bind(*args), dims[0])
_mlir.register_lowering(lane_p, lambda context, x: [x])

Mark = Callable[[Any, int], Any]
_local = threading.local()


@contextlib.contextmanager
def marking(mark: Mark) -> Generator[None]:
  """In the block each result of a batched operation becomes `mark(result, axis of the lanes)`.

  Wraps JAX's method by which vmap batches an operation (0.10 to 0.12). JAX has no public way to
  find the axis of a vmap.
  """
  _wrap_once()
  before, _local.mark = getattr(_local, "mark", None), mark
  try:
    with tracing.marked(True):  # so that only marking uses traces with marks
      yield
  finally:
    _local.mark = before


def is_marking() -> bool:
  """Returns True in such a block."""
  return getattr(_local, "mark", None) is not None


@_part.once
def _wrap_once() -> None:
  process: Callable[..., Any] = _batching.BatchTrace.process_primitive

  def with_marks(self: Any, primitive: Any, *args: Any, **params: Any) -> Any:
    made = process(self, primitive, *args, **params)
    mark: Mark | None = getattr(_local, "mark", None)
    if mark is None:
      return made

    def marked(result: Any) -> Any:
      if not isinstance(result, _batching.BatchTracer) or not isinstance(result.batch_dim, int):
        return result
      if result._trace.tag is not self.tag:  # pyright: ignore[reportPrivateUsage]
        return result
      with _core.set_current_trace(self.parent_trace):
        value = mark(result.val, result.batch_dim)
      return _batching.BatchTracer(self, value, result.batch_dim, result.source_info)

    return [marked(one) for one in made] if primitive.multiple_results else marked(made)

  _batching.BatchTrace.process_primitive = with_marks
