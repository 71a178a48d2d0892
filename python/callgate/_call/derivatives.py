"""Derivatives of gates: the user's rules, the reference's, finite differences, or linearity.

Rules go through `jax.custom_jvp` and `jax.custom_vjp` around the raw call, so that they compose
with every transformation as any custom derivative of JAX's does. A linear call is transposed
instead.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from callgate._call.rules import Rules, Static
from callgate._call.site import Callee, CallSite
from callgate._core import registry
from callgate._core.errors import GateDefinitionError
from callgate._jax import tracing


def no_derivative_message(gate: Callee) -> str:
  """What a user without derivative rules needs to know."""
  it = gate.kind.split()[-1]
  return (
    f"{gate.label} has no derivative. Define one in any of four ways: {it}.defjvp(rule), "
    f"{it}.defvjp(fwd, bwd), like=reference (a JAX function of the same signature, whose "
    f"derivative then serves), or gradient='finite-difference'. A {it} that is linear takes "
    f"linear= and {it}.deftranspose(rule)."
  )


def apply(
  gate: Callee, rules: Rules, args: tuple[Any, ...], kwargs: dict[str, Any], static: Static
) -> Any:
  """Calls the gate with whatever derivative it has."""
  if not rules.defined and gate.like is None:
    return gate.apply_raw(args, kwargs, static)
  wrapped = rules.wrapped.get(static)
  if wrapped is None:
    wrapped = rules.wrapped[static] = _wrap(gate, rules, static)
  return wrapped(*_vary_alike(gate, args))


def _wrap(gate: Callee, rules: Rules, static: Static) -> Callable[..., Any]:
  def call(*args: Any) -> Any:
    return gate.apply_raw(args, {}, static)

  call.__name__ = call.__qualname__ = gate.name

  def ruled(function: Callable[..., Any], lead: int) -> Callable[..., Any]:
    def rule(*args: Any) -> Any:
      return _vary_as(args, gate.call_rule(function, args[:lead], args[lead:], {}, static))

    return rule

  if rules.vjp is not None:
    fwd, bwd = rules.vjp
    with_vjp = jax.custom_vjp(call)
    with_vjp.defvjp(ruled(fwd, 0), ruled(bwd, 2))
    return with_vjp
  with_jvp = jax.custom_jvp(call)
  if rules.jvp is not None:
    with_jvp.defjvp(ruled(rules.jvp, 2), symbolic_zeros=rules.symbolic_zeros)
  elif gate.like is not None:
    like = functools.partial(_jvp_of_reference, gate.label, with_jvp, ruled(gate.like, 0))
    with_jvp.defjvp(like)
  else:
    with_jvp.defjvp(functools.partial(_jvp_by_differences, with_jvp))
  return with_jvp


def _vary_alike(gate: Callee, args: tuple[Any, ...]) -> tuple[Any, ...]:
  """In a `jax.shard_map`, arguments that vary over the same mesh axes.

  So rules may be written as if there was one device: where devices share an argument, the cast's
  transpose adds up the cotangents of all, which vary as the results do.
  """
  if not tracing.manual_axes():
    return args
  leaves, tree = jax.tree.flatten(args)
  arrays = [x if isinstance(x, jax.Array) else jnp.asarray(x) for x in leaves]
  return jax.tree.unflatten(tree, tracing.vary_alike(gate.label, arrays))


def _vary_as(args: Any, found: Any) -> Any:
  """In a `jax.shard_map`, what a rule found, varying over the axes that its arguments vary over.

  Constants, such as a rule's zeros, vary over none.
  """
  if not tracing.manual_axes():
    return found
  axes = tracing.varying_axes([x for x in jax.tree.leaves(args) if _is_number(x)])
  return jax.tree.map(lambda x: tracing.vary_over(axes, x) if _is_number(x) else x, found)


def _is_number(leaf: Any) -> bool:
  dtype = getattr(leaf, "dtype", None)
  return isinstance(leaf, (jax.Array, np.ndarray)) and dtype != jax.dtypes.float0


def _jvp_of_reference(
  label: str, call: Callable[..., Any], like: Callable[..., Any], primals: Any, tangents: Any
) -> tuple[Any, Any]:
  results = call(*primals)
  found, moved = jax.jvp(like, primals, tangents)
  check_reference(label, results, found)
  return results, moved


def check_reference(label: str, results: Any, found: Any) -> None:
  """Raises where what `like` found is not of the structure, shapes and dtypes that `out` says."""
  if jax.tree.structure(found) != jax.tree.structure(results):
    raise GateDefinitionError(
      f"{label}: like: expected results of the structure {jax.tree.structure(results)}, got "
      f"{jax.tree.structure(found)}"
    )
  leaves = jax.tree.leaves(found)
  for index, (want, got) in enumerate(zip(jax.tree.leaves(results), leaves, strict=True)):
    if jnp.shape(got) != want.shape or jnp.result_type(got) != want.dtype:
      raise GateDefinitionError(
        f"{label}: like: result {index}: expected {_type_text(want)} as of out, got "
        f"{_type_text(got)}"
      )


def _type_text(value: Any) -> str:
  return f"{jnp.result_type(value).name}[{','.join(map(str, jnp.shape(value)))}]"


def _jvp_by_differences(
  call: Callable[..., Any], primals: tuple[Any, ...], tangents: tuple[Any, ...]
) -> tuple[Any, Any]:
  """Central differences, as a linear map of the tangents: the Jacobian, then one product.

  Column i is (f(x + h e_i) - f(x - h e_i)) / 2h with h = eps^(1/3) max(1, |x_i|), which balances
  truncation (h^2) and rounding (eps / h): Press et al., Numerical Recipes, section 5.7.
  """
  out = call(*primals)
  leaves, tree = jax.tree.flatten(primals)
  flat_tangents = jax.tree.leaves(tangents)
  total = jax.tree.map(_zero_tangent, out)
  for index, (leaf, tangent) in enumerate(zip(leaves, flat_tangents, strict=True)):
    if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
      continue
    jacobian = _jacobian(call, leaves, tree, index)
    part = jax.tree.map(functools.partial(_product, tangent), jacobian)
    total = jax.tree.map(_add_tangent, total, part)
  return out, total


def _jacobian(call: Callable[..., Any], leaves: list[Any], tree: Any, index: int) -> Any:
  x = jnp.asarray(leaves[index])
  size = float(jnp.finfo(x.dtype).eps) ** (1 / 3)
  step = (size * jnp.maximum(1.0, jnp.abs(x))).astype(x.dtype).ravel()

  def moved(i: Any, h: Any) -> Any:
    shifted = x.ravel().at[i].add(h).reshape(x.shape)
    return call(*jax.tree.unflatten(tree, [*leaves[:index], shifted, *leaves[index + 1 :]]))

  def column(i: Any) -> Any:
    # The step as it was really taken, after rounding.
    taken = (x.ravel()[i] + step[i]) - (x.ravel()[i] - step[i])
    return jax.tree.map(
      lambda up, down: _divide(up, down, taken), moved(i, step[i]), moved(i, -step[i])
    )

  return jax.lax.map(column, jnp.arange(x.size))


def _divide(up: Any, down: Any, width: Any) -> Any:
  if not jnp.issubdtype(up.dtype, jnp.inexact):
    return jnp.zeros(up.shape, jnp.float32)
  return ((up - down) / width).astype(up.dtype)


def _product(tangent: Any, columns: Any) -> Any:
  return jnp.tensordot(jnp.ravel(tangent).astype(columns.dtype), columns, axes=1)


def _zero_tangent(value: Any) -> Any:
  if jnp.issubdtype(value.dtype, jnp.inexact):
    return jnp.zeros(value.shape, value.dtype)
  return np.zeros(value.shape, jax.dtypes.float0)


def _add_tangent(total: Any, part: Any) -> Any:
  return total if total.dtype == jax.dtypes.float0 else total + part


def linear_leaves(gate: Callee, in_tree: Any) -> frozenset[int]:
  """Flat positions of the arguments that the gate is declared linear in."""
  if gate.linear is False:
    return frozenset()
  args, kwargs = jax.tree.unflatten(in_tree, range(in_tree.num_leaves))
  if gate.linear is True:
    return frozenset(range(in_tree.num_leaves))
  del kwargs
  return frozenset(i for p in gate.linear for i in jax.tree.leaves(args[p]))


def check(gate: Callee, arguments: int) -> None:
  """Raises where a call has no argument at a position that the gate is declared linear in."""
  if not isinstance(gate.linear, bool) and max(gate.linear, default=-1) >= arguments:
    raise GateDefinitionError(
      f"{gate.label}: linear: expected positions of the call's {arguments} arguments, got "
      f"{gate.linear!r}"
    )


def linear_names(gate: Callee, site: CallSite) -> str:
  """Names of the linear arguments, for messages."""
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
  if gate.autograd:
    return list(gate.transpose_call(site, cotangents, flat, linear))
  if gate.rules.transpose is None:
    raise GateDefinitionError(
      f"{gate.label} is declared linear but has no transpose, which reverse-mode "
      "differentiation needs; expected a rule given with gate.deftranspose"
    )
  cotangent = jax.tree.unflatten(site.out_tree, cotangents)
  args, kwargs = jax.tree.unflatten(site.in_tree, flat)
  rule = gate.rules.transpose
  grads = gate.call_rule(rule, (cotangent,), args, kwargs, site.static)
  leaves = jax.tree.leaves(grads)
  if len(leaves) != len(linear):
    raise GateDefinitionError(
      f"{gate.label}: the transpose rule returned {len(leaves)} cotangents; expected one for "
      f"each of the linear arguments {linear_names(gate, site)}"
    )
  return leaves
