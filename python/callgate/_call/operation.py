"""What gates and kernels share: options, the call, the rules of transformation, the comparison.

An operation is what a user calls like a JAX function. `Gate` (a Python callable) and `Kernel`
(native code) differ in what a program's call of them runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from callgate._call import derivatives, jax_engine, primitive, shapes
from callgate._call.site import BoundCall, Callee, CallSite, Static
from callgate._core import options
from callgate._core.errors import GateDefinitionError
from callgate._core.failures import raise_deferred
from callgate._runtime import config


class Operation(Callee):
  """A function of arrays that compiled programs call; see `Gate` and `Kernel`.

  Attributes:
    name: what compiled programs call it by; unique among the live ones of the process.
    effect, vmap: as given.
  """

  # -- calling -----------------------------------------------------------------------------------
  def __call__(self, *args: Any, **kwargs: Any) -> Any:
    """Calls it, inside or outside compiled code.

    Args:
      *args: pytrees of arrays (or of Python scalars, which become arrays).
      **kwargs: pytrees that hold an array are arguments too; anything else is static, must be
        hashable, and reaches the function as it is.

    Returns:
      The pytree that `out` (or `like`) declares, of jax.Arrays.
    """
    raise_deferred()
    arrays, static = shapes.split_static(self.label, kwargs)
    if self.has_rule:
      args, arrays = shapes.to_positional(self, args, arrays), {}
      shapes.check_arrays(self, args)
    return derivatives.apply(self, args, arrays, static)

  def apply_raw(self, args: tuple[Any, ...], kwargs: dict[str, Any], static: Static) -> Any:
    derivatives.check(self, len(args) + len(kwargs))
    leaves, in_tree = jax.tree.flatten((args, kwargs))
    leaves = [shapes.as_array(self, leaf, i) for i, leaf in enumerate(leaves)]
    results, out_tree = shapes.result_types(self, in_tree, _structs(leaves), static)
    return self.bind(CallSite(in_tree, out_tree, static, results), leaves)

  def bind(self, site: CallSite, leaves: Sequence[Any]) -> Any:
    """Makes the call that `site` describes, after checks, of flat arguments."""
    structs = _structs(leaves)
    by_jax = config.engine() == "jax"
    site = dataclasses.replace(site, by_jax=by_jax)
    shapes.check_call(self, site, structs)
    self.check_call(site, structs)
    if isinstance(self.sharding, str):  # raises, if it is a rule that doesn't fit
      self.sharding_rule(site, [s.shape for s in structs], [shape for shape, _ in site.results])
    # JAX's callbacks know no derivatives: calls that have one stay calls of ours until lowered.
    if by_jax and not (self.autograd and self.effect != "ordered"):
      flat = jax_engine.bind(self, site, leaves)
    else:
      flat = primitive.bind(*leaves, call=BoundCall(self, site))
    return jax.tree.unflatten(site.out_tree, flat)

  def check_call(self, site: CallSite, structs: Sequence[Any]) -> None:
    """Raises unless the function can take these arrays; by default it takes all."""

  def reference(self, *args: Any, **kwargs: Any) -> Any:
    """What `like` says of the same call."""
    assert self.like is not None
    return self.like(*args, **kwargs)

  # -- rules -------------------------------------------------------------------------------------
  def defjvp(self, rule: Callable[..., Any]) -> Callable[..., Any]:
    """Defines forward-mode derivatives: `rule(primals, tangents) -> (out, tangent_out)`.

    As `jax.custom_jvp.defjvp`; the rule may call this operation. Static keyword arguments are
    passed on to a rule that has parameters for them. Returns the rule, for use as a decorator.
    """
    self.set_jvp(options.function(self.label, "defjvp: rule", rule))
    return rule

  def set_jvp(self, rule: Callable[..., Any], *, symbolic_zeros: bool = False) -> None:
    if self.vjp_rules is not None:
      raise GateDefinitionError(f"{self.label}: defjvp after defvjp; expected one of the two")
    self.jvp_rule, self.symbolic_zeros = rule, symbolic_zeros
    self.differentiable.clear()

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
    self.differentiable.clear()

  def deftranspose(self, rule: Callable[..., Any]) -> Callable[..., Any]:
    """Defines the transpose of what is linear (see `linear=`).

    Args:
      rule: `rule(cotangent, *args)`, where linear arguments are ShapeDtypeStructs and the others
        arrays; returns the cotangent of the linear argument, or a tuple of them in order.

    Where `linear=` names no arguments, the operation counts as linear in all of them from here on.
    """
    self.transpose_rule = options.function(self.label, "deftranspose: rule", rule)
    if self.linear is False:
      self.linear = True
    return rule

  def defvmap(self, rule: Callable[..., Any]) -> Callable[..., Any]:
    """Overrides batching: `rule(axis_size, in_batched, *args) -> (out, out_batched)`.

    As `jax.custom_batching.custom_vmap.def_vmap`: batched leaves have a leading axis;
    `in_batched` has the arguments' structure, `out_batched` the result's.
    """
    self.vmap_rule = options.function(self.label, "defvmap: rule", rule)
    return rule

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


def _structs(leaves: Sequence[Any]) -> list[Any]:
  return [jax.ShapeDtypeStruct(jnp.shape(x), x.dtype) for x in leaves]
