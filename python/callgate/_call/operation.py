# SPDX-License-Identifier: Apache-2.0
"""Gates and kernels share this: options, the call, rules of transformation, the comparison.

An operation is what a user calls like a JAX function. `Gate` (a Python callable) and `Kernel`
(native code) differ in what a program's call of them runs.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Never, Self, TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np

from callgate._call import derivatives, jax_engine, primitive, shapes
from callgate._call.generic import OneArray, P, R
from callgate._call.options import CallOptions
from callgate._call.site import MOST_OBJECTS, BoundCall, Callee, CallSite, Static
from callgate._core import exact, options, split
from callgate._core.errors import GateDefinitionError
from callgate._core.failures import raise_deferred
from callgate._jax import refs, sources, tracing
from callgate._runtime import config

_MOST_PROGRAMS = 1024  # of calls outside of programs that one operation keeps
Rule = TypeVar("Rule", bound=Callable[..., Any])


class Operation(Callee, Generic[P, R]):
  """A function of arrays that compiled programs call; see `Gate` and `Kernel`.

  JAX caches what it has traced for as long as the functions live that it traced, or for ever. So
  what a user holds is a *handle*, which shares all attributes with its *core*, and programs, traces
  and rules know the core alone: they keep nothing of the user's that would keep them.

  For type checkers it has the parameters of the function that it was made from, without those for
  results, and returns what that returns, with jax.Arrays for the arrays of any library.

  Attributes:
    name: what compiled programs call it by; unique among the live ones of the process.
    effect, vmap: as given.
  """

  __slots__ = ("_core", "_eager", "_handle", "_programs")  # what the two don't share
  part_of: Operation | None = None  # what made it for its own calls, and lives as long

  def __init__(self, name: str, options: CallOptions) -> None:
    super().__init__(name, options)
    self._defined: dict[str, tuple[Any, ...]] = {}  # rules by the methods that took them
    make = functools.partial(_with_rules, weakref.ref(self))
    self.differentiable = tracing.clearable_cache(MOST_OBJECTS)(make)

  def handle(self) -> Self:
    """The object that a user gets of it."""
    made = object.__new__(type(self))
    made.__dict__ = self.__dict__
    made._core, self._handle = self, weakref.ref(made)
    return made

  @property
  def core(self) -> Self:
    """The part of it that programs know."""
    return getattr(self, "_core", self)

  def programs(self, site: CallSite) -> Callable[..., Any] | None:
    if self.part_of is not None:
      return self.part_of.programs(site)
    handle: Self | None = self._handle() if hasattr(self, "_handle") else None
    if handle is None:
      return None
    if not hasattr(handle, "_programs"):
      made = tracing.eager_programs(_MOST_PROGRAMS), tracing.eager_programs(MOST_OBJECTS)
      handle._programs = made
    return handle._programs[site.has_objects]

  # -- calling -----------------------------------------------------------------------------------
  @overload
  def __call__(self: Operation[P, Never], *args: P.args, **kwargs: P.kwargs) -> Any: ...
  @overload
  def __call__(self: Operation[P, None], *args: P.args, **kwargs: P.kwargs) -> tuple[()]: ...
  @overload
  def __call__(self: Operation[P, OneArray], *args: P.args, **kwargs: P.kwargs) -> jax.Array: ...
  @overload
  def __call__(
    self: Operation[P, tuple[OneArray, ...]], *args: P.args, **kwargs: P.kwargs
  ) -> tuple[jax.Array, ...]: ...
  @overload
  def __call__(
    self: Operation[P, Mapping[str, OneArray]], *args: P.args, **kwargs: P.kwargs
  ) -> dict[str, jax.Array]: ...
  @overload
  def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R: ...
  def __call__(self, *args: Any, **kwargs: Any) -> Any:
    """Calls it, inside or outside compiled code.

    Args:
      *args: pytrees of arrays (or of Python scalars, which become arrays). Other content of one, as
        a module's functions and strings, is static: the callable gets the same structure.
      **kwargs: pytrees that hold an array are arguments too; anything else is static, must be
        hashable, and reaches the function as it is.

    Static values are the same if nothing tells them apart: numbers, text and frozen dataclasses of
    these by type and content, any other object by its identity.

    Returns:
      The pytree that `out` (or `like`) declares, of jax.Arrays.
    """
    raise_deferred()
    if not kwargs and tracing.in_no_trace() and all(map(tracing.is_plain_array, args)):
      return self._alone(*args)
    return derivatives.apply(self.core, *self.given(args, kwargs))

  @property
  def _alone(self) -> Callable[..., Any]:
    """A program of one call, for arrays alone: JAX dispatches it in C++ from the second time on."""
    if not hasattr(self, "_eager"):
      core = self.core

      @sources.shared
      def call(*args: Any) -> Any:
        return derivatives.apply(core, *core.given(args, {}))

      call.__name__ = call.__qualname__ = core.name
      self._eager = jax.jit(call)
    return self._eager

  def given(
    self, args: tuple[Any, ...], kwargs: dict[str, Any]
  ) -> tuple[tuple[Any, ...], dict[str, Any], Static]:
    """A call's arguments by place, the arrays among those by keyword, and the static rest."""
    args, kwargs = refs.read((args, kwargs))
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
    """Makes the call that `site` describes, after checks, of flat arguments."""
    structs = _structs(leaves)
    by_jax = config.engine() == "jax"
    site = dataclasses.replace(site, by_jax=by_jax, cast=self.casts())
    shapes.check_call(self, site, structs)
    self.check_call(site, structs)
    if isinstance(self.sharding, str):  # raises, if it is a rule that doesn't fit
      self.sharding_rule(site, [s.shape for s in structs], [shape for shape, _ in site.results])
    # JAX's callbacks know no derivatives, handles, lanes or cells, and no vmap of what is ordered:
    # such calls stay ours until lowered.
    own = self.traits
    stays = own.autograd or own.handles or own.of_thread or own.by_lane or own.reads_cell
    stays = stays or self.effect == "ordered" or self.transpose_rule is not None
    if by_jax and not stays:
      flat = jax_engine.bind(self.core, site, leaves)
    else:
      flat = primitive.bind(*leaves, call=BoundCall(self.core, site))
    return jax.tree.unflatten(site.out_tree, flat)

  def casts(self) -> bool:
    """True if results are cast to declared types of the same kind, in calls traced now."""
    return config.cast() if self.cast is None else self.cast

  def check_call(self, site: CallSite, structs: Sequence[Any]) -> None:
    """Raises unless the function can take these arrays; by default it takes all."""

  def reference(self, *args: Any, **kwargs: Any) -> Any:
    """Returns what `like` says of the same call."""
    assert self.like is not None
    arrays, static = shapes.split_static(self.label, kwargs)
    return self.call_rule(self.like, (), args, arrays, static)

  # -- rules -------------------------------------------------------------------------------------
  def defjvp(self, rule: Rule) -> Rule:
    """Defines forward-mode derivatives: `rule(primals, tangents) -> (out, tangent_out)`.

    As `jax.custom_jvp.defjvp`; the rule may call this operation. Static keyword arguments are
    passed on to a rule that has parameters for them. Returns the rule, for use as a decorator.
    """
    self.set_jvp(options.function(self.label, "defjvp: rule", rule))
    self._defined["defjvp"] = (rule,)
    return rule

  def set_jvp(self, rule: Callable[..., Any], *, symbolic_zeros: bool = False) -> None:
    if self.vjp_rules is not None:
      raise GateDefinitionError(f"{self.label}: defjvp after defvjp; expected one of the two")
    self.jvp_rule, self.symbolic_zeros = rule, symbolic_zeros
    self.differentiable.cache_clear()

  def defvjp(self, fwd: Callable[..., Any], bwd: Callable[..., Any]) -> None:
    """Defines reverse-mode derivatives, as `jax.custom_vjp.defvjp`.

    Args:
      fwd: `fwd(*args) -> (out, residuals)`.
      bwd: `bwd(residuals, cotangent) -> tuple of cotangents`, one for each positional argument.
    """
    given = (("fwd", fwd), ("bwd", bwd))
    forward, backward = (options.function(self.label, f"defvjp: {n}", f) for n, f in given)
    if self.jvp_rule is not None:
      raise GateDefinitionError(f"{self.label}: defvjp after defjvp; expected one of the two")
    self.vjp_rules = forward, backward
    self._defined["defvjp"] = (fwd, bwd)
    self.differentiable.cache_clear()

  def deftranspose(self, rule: Rule) -> Rule:
    """Defines the transpose of what is linear (see `linear=`).

    Args:
      rule: `rule(cotangent, *args)`, where linear arguments are ShapeDtypeStructs and the others
        arrays; returns the cotangent of the linear argument, or a tuple of them in order.

    Where `linear=` names no arguments, the operation counts as linear in all of them from here on.
    """
    self.transpose_rule = options.function(self.label, "deftranspose: rule", rule)
    if self.linear is False:
      self.linear = True
    self._defined["deftranspose"] = (rule,)
    return rule

  def defvmap(self, rule: Rule) -> Rule:
    """Overrides batching: `rule(axis_size, in_batched, *args) -> (out, out_batched)`.

    As `jax.custom_batching.custom_vmap.def_vmap`: batched leaves have a leading axis;
    `in_batched` has the arguments' structure, `out_batched` the result's.
    """
    self.vmap_rule = options.function(self.label, "defvmap: rule", rule)
    self._defined["defvmap"] = (rule,)
    return rule

  def _rules(self) -> dict[str, tuple[Any, ...]] | None:
    return self._defined or None

  def __setstate__(self, rules: dict[str, tuple[Any, ...]]) -> None:
    for method, given in rules.items():
      if method not in self._defined:
        getattr(self, method)(*given)

  def check(self, *args: Any, rtol: float = 1e-5, atol: float = 1e-6, **kwargs: Any) -> None:
    """Compares the results with those of `like`, the reference, on real values.

    Raises:
      AssertionError: a result differs; the message has NumPy's table of mismatches.
      GateDefinitionError: there is no `like`, or it returns another structure, shape or dtype.
    """
    if self.like is None:
      raise GateDefinitionError(f"{self.label}: check() needs like=, the reference to compare")
    got, want = self(*args, **kwargs), self.reference(*args, **kwargs)
    derivatives.check_reference(self.label, got, want)
    paths = jax.tree_util.tree_flatten_with_path(want)[0]
    for (path, reference), value in zip(paths, jax.tree.leaves(got), strict=True):
      np.testing.assert_allclose(
        np.asarray(value, np.asarray(reference).dtype),
        reference,
        rtol=rtol,
        atol=atol,
        err_msg=f"{self.label}, result {jax.tree_util.keystr(path)}",
      )


def _with_rules(
  operation: weakref.ref[Operation[Any, Any]],
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
