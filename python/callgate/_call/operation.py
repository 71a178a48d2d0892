"""What gates and kernels share: options, the call, the rules of transformation, the comparison.

An operation is what a user calls like a JAX function. `Gate` (a Python callable) and `Kernel`
(native code) differ in what a program's call of them runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from callgate._call import derivatives, jax_engine, primitive, shapes
from callgate._call.options import CallOptions, Effect, Vmap
from callgate._call.rules import Rules
from callgate._call.site import Backend, CallSite, TangentCall
from callgate._core import options, registry, signatures
from callgate._core.encoding import Level
from callgate._core.errors import GateDefinitionError
from callgate._core.failures import raise_deferred
from callgate._runtime import config
from callgate._sharding import rules


class Operation:
  """A function of arrays that compiled programs call; see `Gate` and `Kernel`.

  Attributes:
    name: what compiled programs call it by; unique among the live ones of the process.
    effect, vmap: as given.
  """

  kind = "operation"
  parameters: tuple[str, ...] = ()
  arrays = "numpy"
  style = "inplace"
  cast = False
  collective = False
  # Whether it differentiates itself (`tangent_call`), where the user gives no rule.
  autograd = False
  # Whether one call does in programs for several platforms.
  same_on_all_platforms = False
  one_calls_for_all = False

  def __init__(self, name: str, options: CallOptions) -> None:
    """Takes options that are checked."""
    self.name = name
    self.out = options.out
    self.like = options.like
    self.effect: Effect = options.effect
    self.vmap_rule: Callable[..., Any] | None = options.vmap if callable(options.vmap) else None
    self.vmap: Vmap = "each" if callable(options.vmap) else options.vmap
    self.sharding = options.sharding
    self.linear = cast("bool | tuple[int, ...]", options.linear)
    self.aliases = dict(options.aliases or {})
    self.rules = Rules(gradient=options.gradient)

  @property
  def label(self) -> str:
    """What messages call it."""
    return f"{self.kind} '{self.name}'"

  def __repr__(self) -> str:
    return f"<{self.label}>"

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
    if self.rules.defined or self.like is not None:
      if arrays:
        args, arrays = shapes.to_positional(self, args, arrays)
      shapes.check_arrays(self, args)
    return derivatives.apply(self, self.rules, args, arrays, static)

  def apply_raw(
    self, args: tuple[Any, ...], kwargs: dict[str, Any], static: tuple[tuple[str, Any], ...]
  ) -> Any:
    """Binds the call, without derivative rules of its own."""
    derivatives.check(self, len(args) + len(kwargs))
    leaves, in_tree = jax.tree.flatten((args, kwargs))
    leaves = [shapes.as_array(self, leaf, i) for i, leaf in enumerate(leaves)]
    structs = [jax.ShapeDtypeStruct(jnp.shape(x), x.dtype) for x in leaves]
    results, out_tree = shapes.result_types(self, in_tree, structs, static)
    return self.bind(CallSite(in_tree, out_tree, static, results), leaves)

  def bind(self, site: CallSite, leaves: Sequence[Any]) -> Any:
    """Makes the call that `site` describes, after checks, of flat arguments."""
    structs = [jax.ShapeDtypeStruct(jnp.shape(x), x.dtype) for x in leaves]
    by_jax = config.engine() == "jax"
    # JAX's callbacks know no derivatives: calls that have one stay calls of ours until lowered.
    stays = self.autograd and self.effect != "ordered"
    site = dataclasses.replace(site, by_jax=by_jax)
    shapes.check_call(self, site, structs)
    self.check_call(site, structs)
    if isinstance(self.sharding, str):  # raises, if it is a rule that doesn't fit
      self.sharding_rule(site, [s.shape for s in structs], [shape for shape, _ in site.results])
    if by_jax and not stays:
      flat = jax_engine.bind(self, site, leaves)
    else:
      flat = primitive.bind(*leaves, gate=self, site=site, levels=(), whole=None)
    return jax.tree.unflatten(site.out_tree, flat)

  def check_call(self, site: CallSite, structs: Sequence[Any]) -> None:
    """Raises unless the function can take these arrays; by default it takes all."""

  def backend(self, platform: str) -> Backend:
    """What makes the calls of programs for a platform of `RUNTIME_PLATFORMS`.

    Raises:
      GateDefinitionError: it has no code for that platform.
    """
    raise NotImplementedError

  def sharding_rule(
    self, site: CallSite, operands: Sequence[Any], results: Sequence[Any]
  ) -> rules.Rule:
    """Which dimensions of one lane's arrays may be split over devices.

    Args:
      site: the call's static description.
      operands: the shapes of a lane's operands.
      results: the shapes of its results.
    """
    del site
    return rules.of_call(self.label, self.sharding, operands, results)

  def tangent_call(self, site: CallSite, moved: Sequence[int]) -> TangentCall:
    """The call that computes tangents; asked of operations with `autograd`.

    Args:
      site: the call's static description.
      moved: flat positions of the arguments that have tangents.
    """
    raise NotImplementedError

  def transpose_call(
    self, site: CallSite, cotangents: Sequence[Any], flat: Sequence[Any], linear: Sequence[int]
  ) -> Sequence[Any]:
    """Cotangents of the linear arguments of a tangent call; asked of operations with `autograd`.

    Args:
      site: the call's static description.
      cotangents: of the results.
      flat: the arguments; ShapeDtypeStructs for those at `linear`.
      linear: the flat positions whose cotangents are wanted.
    """
    raise NotImplementedError

  def batching(self, site: CallSite, mask: Sequence[bool], lanes: Sequence[Any]) -> Vmap:
    """How a call is batched that the runtime does not loop over yet.

    Args:
      site: the call's static description.
      mask: for each flat argument, whether it has a batch axis.
      lanes: ShapeDtypeStructs of one lane's arguments.
    """
    del site, mask, lanes
    return self.vmap

  def batched(self, whole: Level | None) -> Operation:
    """What runs a call whose arguments have the one leading axis `whole`: itself, as a rule."""
    del whole
    return self

  def on_host(self, *args: Any, **kwargs: Any) -> Any:
    """The function on the host's arrays, without the runtime: what JAX's own callbacks call."""
    raise NotImplementedError

  def call_rule(
    self,
    function: Callable[..., Any],
    lead: Sequence[Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    static: tuple[tuple[str, Any], ...],
  ) -> Any:
    """Calls a user's function about this operation: a rule, a reference.

    Args:
      function: takes `lead` and the call's arguments.
      lead: what comes before the arguments.
      args: the arguments that are arrays (or types of them).
      kwargs: those by keyword.
      static: the static ones; the function gets those that it has parameters for.
    """
    return function(*lead, *args, **kwargs, **signatures.accepted(function, dict(static)))

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
    self.rules.set_jvp(self.label, options.function(self.label, "defjvp: rule", rule))
    return rule

  def defvjp(self, fwd: Callable[..., Any], bwd: Callable[..., Any]) -> None:
    """Defines reverse-mode derivatives, as `jax.custom_vjp.defvjp`.

    Args:
      fwd: `fwd(*args) -> (out, residuals)`.
      bwd: `bwd(residuals, cotangent) -> tuple of cotangents`, one for each positional argument.
    """
    self.rules.set_vjp(
      self.label,
      options.function(self.label, "defvjp: fwd", fwd),
      options.function(self.label, "defvjp: bwd", bwd),
    )

  def deftranspose(self, rule: Callable[..., Any]) -> Callable[..., Any]:
    """Defines the transpose of what is linear (see `linear=`).

    Args:
      rule: `rule(cotangent, *args)`, where linear arguments are ShapeDtypeStructs and the others
        arrays; returns the cotangent of the linear argument, or a tuple of them in order.

    Where `linear=` names no arguments, the operation counts as linear in all of them from here on.
    """
    self.rules.transpose = options.function(self.label, "deftranspose: rule", rule)
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
        err_msg=f"{self.label}, result {registry.keystr(path)}",
      )
