# SPDX-License-Identifier: Apache-2.0
"""The core that gates and kernels share: the call, its options, rules of transformation.

`Gate` (a Python callable) and `Kernel` (native code) differ in the code that a call runs.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from callgate._call import derivatives, jax_engine, primitive, shapes
from callgate._call.options import CallOptions
from callgate._call.site import MOST_OBJECTS, BoundCall, Callee, CallSite, Static
from callgate._core import exact, split
from callgate._core.errors import GateDefinitionError
from callgate._jax import refs, tracing
from callgate._runtime import config


class Operation(Callee):
  """The core of an `ArrayFunction`: a gate or kernel for programs, traces and rules.

  JAX caches a trace as long as the traced functions live, or forever. So a trace refers to this
  core and never to the `ArrayFunction`, which the user may drop.
  """

  # The callable that gives the user's object its name and documentation.
  wraps: Callable[..., Any] | None = None
  part_of: Operation | None = None  # its maker, which lives as long
  # Returns the programs that the user's `ArrayFunction` keeps, if that lives.
  users_programs: Callable[[], Any] | None = None

  def __init__(self, name: str, options: CallOptions) -> None:
    super().__init__(name, options)
    make = functools.partial(_with_rules, weakref.ref(self))
    self.differentiable = tracing.clearable_cache(MOST_OBJECTS)(make)

  def programs(self, site: CallSite) -> Callable[..., Any] | None:
    if self.part_of is not None:
      return self.part_of.programs(site)
    kept = self.users_programs and self.users_programs()
    return None if kept is None else kept.of(site)

  # -- calling -----------------------------------------------------------------------------------
  def __call__(self, *args: Any, **kwargs: Any) -> Any:
    """Calls it, as its `ArrayFunction` does."""
    return split.joined(derivatives.apply(self, *self.given(args, kwargs)))

  def given(
    self, args: tuple[Any, ...], kwargs: dict[str, Any]
  ) -> tuple[tuple[Any, ...], dict[str, Any], Static]:
    """Returns a call's positional arguments, its array keywords, and its static keywords."""
    args, kwargs = refs.read((args, kwargs))
    shapes.check_parameters(self, self.binds, args, kwargs)
    arrays, static = shapes.split_static(self.label, kwargs)
    if self.traits.splits:
      args = tuple(map(split.split, args))
      if self.is_of_object(args) and jax.tree_util.all_leaves(args[:1]):
        args = (split.Static.of_object(args[0]), *args[1:])
      arrays = {name: split.split(value) for name, value in arrays.items()}
    if self.has_rule:
      args, arrays = shapes.to_positional(self, args, arrays), {}
      shapes.check_arrays(self, args)
    return args, arrays, static

  def apply_raw(self, args: tuple[Any, ...], kwargs: dict[str, Any], static: Static) -> Any:
    derivatives.check(self, len(args) + len(kwargs))
    leaves, in_tree = jax.tree.flatten((args, kwargs))
    leaves = [shapes.as_array(self, leaf, i, in_tree) for i, leaf in enumerate(leaves)]
    results, out_tree = shapes.result_types(self, in_tree, _structs(leaves), static)
    return self.bind(CallSite(in_tree, out_tree, static, results), leaves)

  def bind(self, site: CallSite, leaves: Sequence[Any]) -> Any:
    """Checks and makes the call that `site` describes, with flat arguments."""
    structs = _structs(leaves)
    by_jax = config.engine() == "jax"
    site = dataclasses.replace(site, by_jax=by_jax, cast=self.casts())
    shapes.check_call(self, site, structs)
    self.check_call(site, structs)
    if isinstance(self.sharding, str):  # raises for a rule that doesn't fit
      self.sharding_rule(site, [s.shape for s in structs], [shape for shape, _ in site.results])
    # JAX's callbacks support neither derivatives, handles, lanes and cells, nor vmap of ordered
    # calls. Such calls stay callgate's until they are lowered.
    own = self.traits
    stays = own.autograd or own.handles or own.of_thread or own.by_lane or own.reads_cell
    stays = stays or self.effect == "ordered" or self.transpose_rule is not None
    if by_jax and not stays:
      flat = jax_engine.bind(self, site, leaves)
    else:
      flat = primitive.bind(*leaves, call=BoundCall(self, site))
    return jax.tree.unflatten(site.out_tree, flat)

  def casts(self) -> bool:
    """Returns True if calls traced now cast results within a kind."""
    return config.cast() if self.cast is None else self.cast

  def check_call(self, site: CallSite, structs: Sequence[Any]) -> None:
    """Raises unless the function accepts these arrays; by default it accepts all."""

  def reference(self, *args: Any, **kwargs: Any) -> Any:
    """Returns the results of `like` for the same call."""
    assert self.like is not None
    arrays, static = shapes.split_static(self.label, kwargs)
    return self.call_rule(self.like, (), args, arrays, static)

  # -- rules -------------------------------------------------------------------------------------
  def set_jvp(self, rule: Callable[..., Any], *, symbolic_zeros: bool = False) -> None:
    if self.vjp_rules is not None:
      raise GateDefinitionError(f"{self.label}: expected one of defjvp and defvjp, got both")
    self.jvp_rule, self.symbolic_zeros = rule, symbolic_zeros
    self.differentiable.cache_clear()

  def set_vjp(self, forward: Callable[..., Any], backward: Callable[..., Any]) -> None:
    if self.jvp_rule is not None:
      raise GateDefinitionError(f"{self.label}: expected one of defjvp and defvjp, got both")
    self.vjp_rules = forward, backward
    self.differentiable.cache_clear()

  def set_transpose(self, rule: Callable[..., Any]) -> None:
    self.transpose_rule = rule
    if self.linear is False:
      self.linear = True


def _with_rules(
  operation: weakref.ref[Operation],
  static: exact.Exact,
  tree: exact.Exact | None,
  line: Any,
) -> Callable[..., Any]:
  del line  # of the cache's key
  gate = operation()
  assert gate is not None
  return derivatives.with_rules(gate, static.value, tree and tree.value)


def _structs(leaves: Sequence[Any]) -> list[Any]:
  return [jax.ShapeDtypeStruct(jnp.shape(x), x.dtype) for x in leaves]
