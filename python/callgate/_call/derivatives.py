# SPDX-License-Identifier: Apache-2.0
"""Derivatives of gates: the user's rules, the reference's, finite differences, or linearity.

Rules are `jax.custom_jvp` and `jax.custom_vjp` around the raw call, so they compose with every
transformation. A linear call is transposed instead.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Generator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from callgate._call import shapes
from callgate._call.site import Callee, CallSite, Static
from callgate._core import exact, registry, split
from callgate._core.dtypes import is_inexact, type_text
from callgate._core.errors import GateDefinitionError
from callgate._jax import sources, tracing


def no_derivative(
  gate: Callee, site: CallSite, linear: frozenset[int], refused: Sequence[int]
) -> GateDefinitionError:
  """Returns the error for a gate without a derivative with respect to the `refused` arguments."""
  if gate.no_derivatives:
    return GateDefinitionError(gate.no_derivatives)
  it = gate.kind.split()[-1]
  ways = (
    f"{gate.label} has no derivative. Define one with {it}.defjvp(rule), {it}.defvjp(fwd, bwd), "
    "like=reference (a JAX function of the same signature) or gradient='finite-difference'; a "
    f"linear {it} takes linear= and {it}.deftranspose(rule). If you don't need a derivative, "
    "apply jax.lax.stop_gradient to the arguments."
  )
  if not site.results:
    ways = (
      f"{gate.label} has no results and no derivative. Apply jax.lax.stop_gradient to the "
      "arguments, or use callgate.tap, which is differentiable."
    )
  if gate.traits.handles:
    ways = (
      f"{gate.label} has no derivative. Define one with jax.custom_jvp or jax.custom_vjp around "
      "the call, which accept handles as arguments and residuals. A linear gate takes linear=, "
      "for forward mode."
    )
  if linear:
    ways = (
      f"{gate.label}: differentiated with respect to argument "
      f"{registry.argument(gate.name, site.spec, refused[0])}, in which it is not declared "
      f"linear; expected only argument(s) {linear_names(gate, site)}. {ways}"
    )
  return GateDefinitionError(ways)


_BACKWARD = "callgate.bwd:"  # the prefix of backward functions' names


def name_backward(gate: Callee, backward: Callable[..., Any]) -> None:
  """Names a gate's backward function, so that its forward mode is refused in the gate's name."""
  backward.__name__ = backward.__qualname__ = f"{_BACKWARD}{gate.name}"


def refuse_forward_mode(name: str) -> None:
  """Raises if `name` is that of a gate's backward function, which has no forward mode."""
  if not name.startswith(_BACKWARD):
    return
  gate = registry.get(name := name.removeprefix(_BACKWARD))
  label, it = (gate.label, gate.kind) if gate is not None else (f"gate '{name}'", "gate")
  raise GateDefinitionError(
    f"{label} has no forward mode: defvjp serves only reverse mode (grad, vjp, jacrev). Use "
    f"{it}.defjvp(rule), which serves both modes; or replace hessian by jacrev of jacrev"
  )


# The call of each thread whose rule only has to give the derivative; see `apply`.
_rule = threading.local()


@contextlib.contextmanager
def _asking(gate: Callee, args: Any, results: Any) -> Generator[None]:
  outer = getattr(_rule, "call", None)
  _rule.call = gate, jax.tree.leaves(args), results
  try:
    yield
  finally:
    _rule.call = outer


def may_reuse_call() -> bool:
  """Returns True in a rule that only has to give the derivative, of known results."""
  return getattr(_rule, "call", None) is not None


def _known(gate: Callee, args: Any = None) -> Any:
  """Returns the results of the known call; None if the rule makes another call.

  Without `args` the call counts as the known one; else its arguments must be these.
  """
  of, leaves, results = getattr(_rule, "call", None) or (None, [], None)
  if of is not gate:
    return None
  own = leaves if args is None else jax.tree.leaves(args)
  same = len(own) == len(leaves) and all(
    tracing.behind(a) is tracing.behind(b) for a, b in zip(own, leaves, strict=True)
  )
  return results if same else None


def apply(
  gate: Callee, args: tuple[Any, ...], kwargs: dict[str, Any], static: Static, results: Any = None
) -> Any:
  """Calls the gate with the derivative that it has.

  Args:
    results: the results of a call that was made before, if only the derivative is needed. A rule
      that makes this call gets them.
  """
  if not gate.has_rule:
    return gate.apply_raw(args, kwargs, static)
  if results is None and (known := _known(gate, args)) is not None:
    return known
  tree = jax.tree.structure(args)
  # JAX traces a function with rules once for all calls, so each user's line gets its own.
  line = None if tracing.in_no_trace() else sources.users_line()
  call = gate.differentiable(
    exact.exact(static), exact.exact_tree(tree) if split.is_split(tree) else None, line
  )
  if tracing.manual_axes():
    # In a `jax.shard_map` all arguments are cast to vary over the same mesh axes, so rules may be
    # written as for one device. If devices share an argument, the cast's transpose adds up all
    # cotangents, which vary as the results do.
    leaves, tree = jax.tree.flatten(args)
    arrays = [x if isinstance(x, jax.Array) else jnp.asarray(x) for x in leaves]
    args = jax.tree.unflatten(tree, tracing.vary_alike(gate.label, arrays))
  asking = contextlib.nullcontext() if results is None else _asking(gate, args, results)
  with asking, contextlib.nullcontext() if line is None else sources.traced_here():
    return call(*args)


def with_rules(gate: Callee, static: Static, tree: Any) -> Callable[..., Any]:
  """Returns a call with its rules around it; `tree` is the structure of the split arguments."""

  def call(*args: Any) -> Any:
    return gate.apply_raw(args, {}, static)

  call.__name__ = call.__qualname__ = gate.name

  def lying(primals: Any, *found: Any) -> Any:
    """Gives a rule's results the explicit shardings of the call's results."""
    if not _are_explicit(primals):
      return found
    types = tracing.types_of_results(call, primals)
    return tuple(_reshard_as(types, values) for values in found)

  def ruled(
    function: Callable[..., Any], lead: int, checked: Callable[[Any], Any] = lambda found: found
  ) -> Callable[..., Any]:
    def rule(*args: Any) -> Any:
      found = gate.call_rule(function, args[:lead], args[lead:], {}, static)
      return _vary_as(args, checked(found))

    return rule

  if gate.vjp_rules is not None:
    fwd, bwd = gate.vjp_rules
    forward, backward = ruled(fwd, 0), ruled(bwd, 2)
    name_backward(gate, backward)

    def backward_split(residuals: Any, cotangent: Any) -> Any:
      found = backward(residuals, cotangent)
      try:
        return split.split_as(tree, found)
      except ValueError as error:
        expected = jax.tree.structure(split.flags(tree, [True] * tree.num_leaves))
        what = f"defvjp: bwd: expected cotangents of the structure {expected}"
        raise GateDefinitionError(
          f"{gate.label}: {what}, got {jax.tree.structure(found)}"
        ) from error

    name_backward(gate, backward_split)
    with_vjp = jax.custom_vjp(call)
    if tree is None:
      with_vjp.defvjp(lambda *args: split.split_keys(forward(*args)), backward)
    else:
      with_vjp.defvjp(lambda *args: split.split(forward(*args)), backward_split)
    return with_vjp
  with_jvp = jax.custom_jvp(call)
  if gate.jvp_rule is not None:
    forward_rule = ruled(gate.jvp_rule, 2, functools.partial(_with_tangents, gate.label))

    def jvp_rule(primals: Any, tangents: Any) -> Any:
      return lying(primals, *forward_rule(primals, tangents))

    with_jvp.defjvp(jvp_rule, symbolic_zeros=gate.symbolic_zeros)
  elif gate.like is None:
    with_jvp.defjvp(functools.partial(_jvp_by_differences, with_jvp))
  else:
    like = ruled(gate.like, 0, split.split_keys)

    @with_jvp.defjvp
    def _(primals: Any, tangents: Any) -> tuple[Any, Any]:
      results = _known(gate)
      if results is None:
        results = with_jvp(*primals)
      found, moved = jax.jvp(like, primals, tangents)
      check_reference(gate.label, results, found)
      return results, *lying(primals, shapes.numbers_as_arrays(moved))

  return with_jvp


def _with_tangents(label: str, found: Any) -> tuple[Any, Any]:
  """Checks and returns the results and tangents of a jvp rule."""
  results, moved = shapes.numbers_as_arrays(
    shapes.pair(f"{label}: the jvp rule", "(out, tangent_out)", found)
  )
  leaves, tree = jax.tree.flatten(results)
  tangents, moved_tree = jax.tree.flatten(moved)
  if moved_tree != tree:
    raise GateDefinitionError(
      f"{label}: the jvp rule returned tangents of structure {moved_tree}; expected {tree}, the "
      "structure of its results"
    )
  for index, (result, tangent) in enumerate(zip(leaves, tangents, strict=True)):
    expected: Any = jax.typeof(result).to_tangent_aval()
    is_zero = isinstance(tangent, jax.custom_derivatives.SymbolicZero)
    got: Any = tangent.aval if is_zero else jax.typeof(tangent)
    if (got.shape, got.dtype) != (expected.shape, expected.dtype):
      raise GateDefinitionError(
        f"{label}: the jvp rule returned a tangent {got.str_short()} for result {index}; "
        f"expected {expected.str_short()}"
      )
  return split.split_keys(results), split.split_tangents(results, moved)


def _vary_as(args: Any, found: Any) -> Any:
  """Makes a rule's values vary in a `jax.shard_map` as its arguments do, since constants don't."""
  if not tracing.manual_axes():
    return found
  axes = tracing.varying_axes([x for x in jax.tree.leaves(args) if _is_number(x)])
  return jax.tree.map(lambda x: tracing.vary_over(axes, x) if _is_number(x) else x, found)


def _are_explicit(args: Any) -> bool:
  return tracing.are_explicit([x for x in jax.tree.leaves(args) if _is_number(x)])


def _reshard_as(types: Sequence[Any], values: Any) -> Any:
  leaves, tree = jax.tree.flatten(values)
  if len(leaves) != len(types):  # JAX reports this
    return values
  pairs = zip(types, leaves, strict=True)
  return tree.unflatten([tracing.reshard_as(t, x) if _is_number(x) else x for t, x in pairs])


def _is_number(leaf: Any) -> bool:
  return isinstance(leaf, (jax.Array, np.ndarray)) and leaf.dtype != jax.dtypes.float0


def check_reference(label: str, results: Any, found: Any) -> None:
  """Raises if the results of `like` differ from those of `out` in structure, shape or dtype."""
  leaves, tree = jax.tree.flatten(found)
  if tree != (expected := jax.tree.structure(results)):
    raise GateDefinitionError(
      f"{label}: like: expected results of the structure {expected}, got {tree}"
    )
  for index, (want, got) in enumerate(zip(jax.tree.leaves(results), leaves, strict=True)):
    wanted = type_text(want.dtype, want.shape)
    if (have := type_text(jnp.result_type(got), jnp.shape(got))) != wanted:
      raise GateDefinitionError(
        f"{label}: like: result {index}: expected {wanted}, as declared by out=, got {have}"
      )


def _jvp_by_differences(
  call: Callable[..., Any], primals: tuple[Any, ...], tangents: tuple[Any, ...]
) -> tuple[Any, Any]:
  """Computes central differences as a linear map of the tangents: the Jacobian, then one product.

  Column i is (f(x + h e_i) - f(x - h e_i)) / 2h with h = eps^(1/3) max(1, |x_i|), which balances
  truncation (h^2) and rounding (eps / h): Press et al., Numerical Recipes, section 5.7.
  """
  out = call(*primals)
  results, out_tree = jax.tree.flatten(out)
  leaves, tree = jax.tree.flatten(primals)
  directions = jax.tree.leaves(tangents)
  explicit = _are_explicit(leaves)
  if explicit:  # elements of a split array can't be moved
    leaves = tracing.replicate(leaves)
    directions = [
      d if d.dtype == jax.dtypes.float0 else tracing.replicate([d])[0] for d in directions
    ]
  moved = [jnp.zeros(y.shape, y.dtype) for y in results if is_inexact(y.dtype)]
  for index, (leaf, tangent) in enumerate(zip(leaves, directions, strict=True)):
    if jnp.issubdtype(jnp.result_type(leaf), jnp.floating) and 0 not in jnp.shape(leaf):
      columns = _jacobian(call, leaves, tree, index)
      parts = [jnp.tensordot(jnp.ravel(tangent).astype(c.dtype), c, axes=1) for c in columns]
      moved = [total + part for total, part in zip(moved, parts, strict=True)]
  inexact = (y for y in results if is_inexact(y.dtype))
  if explicit:
    moved = [tracing.reshard_as(jax.typeof(y), t) for y, t in zip(inexact, moved, strict=True)]
  found = iter(moved)
  return out, jax.tree.unflatten(
    out_tree,
    [next(found) if is_inexact(y.dtype) else np.zeros(y.shape, jax.dtypes.float0) for y in results],
  )


def _jacobian(call: Callable[..., Any], leaves: list[Any], tree: Any, index: int) -> list[Any]:
  """Returns the results' derivatives by a flat argument, a column in each row."""
  x = jnp.asarray(leaves[index])
  size = float(jnp.finfo(x.dtype).eps) ** (1 / 3)
  step = (size * jnp.maximum(1.0, jnp.abs(x))).astype(x.dtype).ravel()

  def moved(i: Any, h: Any) -> list[Any]:
    shifted = x.ravel().at[i].add(h).reshape(x.shape)
    out = call(*jax.tree.unflatten(tree, [*leaves[:index], shifted, *leaves[index + 1 :]]))
    return [y for y in jax.tree.leaves(out) if is_inexact(y.dtype)]

  def column(i: Any) -> list[Any]:
    # The actual step, after rounding.
    taken = (x.ravel()[i] + step[i]) - (x.ravel()[i] - step[i])
    both = zip(moved(i, step[i]), moved(i, -step[i]), strict=True)
    return [((up - down) / taken).astype(up.dtype) for up, down in both]

  with sources.traced_here():
    return jax.lax.map(column, jnp.arange(x.size))


def linear_leaves(gate: Callee, in_tree: Any) -> frozenset[int]:
  """Returns the flat positions of the arguments in which the gate is linear."""
  if gate.linear is False:
    return frozenset()
  if gate.linear is True:
    return frozenset(range(in_tree.num_leaves))
  args, _ = jax.tree.unflatten(in_tree, range(in_tree.num_leaves))
  return frozenset(i for p in gate.linear for i in jax.tree.leaves(args[p]))


def check(gate: Callee, arguments: int) -> None:
  """Raises if a call has no argument at a position in `linear=`."""
  if not isinstance(gate.linear, bool) and max(gate.linear, default=-1) >= arguments:
    raise GateDefinitionError(
      f"{gate.label}: linear: expected positions of the call's {arguments} arguments, got "
      f"{gate.linear!r}"
    )


def linear_names(gate: Callee, site: CallSite) -> str:
  """Returns the names of the linear arguments, for messages."""
  return ", ".join(
    registry.argument(gate.name, site.spec, i) for i in sorted(linear_leaves(gate, site.in_tree))
  )


def transpose_leaves(
  gate: Callee,
  site: CallSite,
  cotangents: Sequence[Any],
  flat: Sequence[Any],
  linear: Sequence[int],
) -> list[Any]:
  """Runs the transpose rule of one lane on flat values."""
  if gate.traits.autograd:
    return list(gate.transpose_call(site, cotangents, flat, linear))
  if gate.transpose_rule is None:
    known = gate.linear is not False
    way = "gate.deftranspose" if known else "linear= and gate.deftranspose(rule)"
    if gate.traits.handles:
      way = "a jax.custom_vjp around the call, which accepts handles as arguments and residuals"
    what = "is declared linear but has no transpose"
    if not known:
      what = "is called where a value must be linear, and has no transpose"
    raise GateDefinitionError(
      f"{gate.label} {what}, which reverse-mode differentiation needs; define it with {way}"
    )
  cotangent = jax.tree.unflatten(site.out_tree, cotangents)
  args, kwargs = jax.tree.unflatten(site.in_tree, flat)
  grads = gate.call_rule(gate.transpose_rule, (cotangent,), args, kwargs, site.static)
  leaves = jax.tree.leaves(split.split(grads))
  if len(leaves) != len(linear):
    raise GateDefinitionError(
      f"{gate.label}: the transpose rule returned {len(leaves)} cotangents; expected one for "
      f"each linear argument, {linear_names(gate, site)}"
    )
  return leaves
