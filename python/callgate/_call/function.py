# SPDX-License-Identifier: Apache-2.0
"""Array functions that compiled programs call: the public side of gates and kernels."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Generic, Never, TypeVar, overload

import jax
import numpy as np

from callgate import _part
from callgate._call import derivatives
from callgate._call.generic import OneArray, P, R
from callgate._call.operation import Operation
from callgate._call.options import Effect, Vmap
from callgate._call.site import MOST_OBJECTS, CallSite
from callgate._core import options, split
from callgate._core.errors import GateDefinitionError
from callgate._core.failures import raise_deferred
from callgate._core.pickling import Portable
from callgate._jax import sources, tracing

_MOST_PROGRAMS = 1024  # the compiled calls outside jit that a function keeps
Rule = TypeVar("Rule", bound=Callable[..., Any])


class _EagerPrograms:
  """The compiled programs of calls outside jit; they live as long as the `ArrayFunction`."""

  def __init__(self, core: Operation) -> None:
    self._core = core

  @functools.cached_property
  def _kept(self) -> tuple[Any, Any]:
    return tracing.eager_programs(_MOST_PROGRAMS), tracing.eager_programs(MOST_OBJECTS)

  def of(self, site: CallSite) -> Callable[..., Any]:
    return self._kept[site.has_objects]

  @functools.cached_property
  def alone(self) -> Callable[..., Any]:
    """A program of one call for arrays only; JAX dispatches it in C++ from the second call on."""
    core = self._core

    @sources.shared
    def call(*args: Any) -> Any:
      return core(*args)

    call.__name__ = call.__qualname__ = core.name
    return jax.jit(call)


class ArrayFunction(Portable[Any], Generic[P, R]):
  """A function of arrays that compiled programs call; see `Gate` and `Kernel`.

  Type checkers see the parameters of the wrapped function, without the parameters for results. They
  see its return type with `jax.Array` in place of other libraries' arrays.
  """

  __slots__ = ("_defined", "_programs")

  def __init__(self, core: Operation) -> None:
    super().__init__(core)
    self._programs = programs = _EagerPrograms(core)
    core.users_programs = weakref.ref(programs)
    if core.wraps is None:
      self.__name__ = core.name  # the name of jitted programs
    else:
      functools.update_wrapper(self, core.wraps, updated=())
    if core.call_signature is not None:  # without parameters for results and the context
      self.__signature__ = core.call_signature
    self._defined: dict[str, tuple[Any, ...]] = {}  # rules by the methods that took them

  def __repr__(self) -> str:
    return f"<{self._core.label}>"

  @property
  def name(self) -> str:
    """The name in compiled programs; unique among the live gates and kernels of the process."""
    return self._core.name

  @property
  def effect(self) -> Effect:
    """The option `effect`: "pure", "io" or "ordered"."""
    return self._core.effect

  @property
  def vmap(self) -> Vmap:
    """The option `vmap`: how calls are batched; "each" if a rule is set."""
    return self._core.vmap

  # -- calling -----------------------------------------------------------------------------------
  @overload
  def __call__(self: ArrayFunction[P, Never], *args: P.args, **kwargs: P.kwargs) -> Any: ...
  @overload
  def __call__(self: ArrayFunction[P, None], *args: P.args, **kwargs: P.kwargs) -> tuple[()]: ...
  @overload
  def __call__(
    self: ArrayFunction[P, OneArray], *args: P.args, **kwargs: P.kwargs
  ) -> jax.Array: ...
  @overload
  def __call__(
    self: ArrayFunction[P, tuple[OneArray, ...]], *args: P.args, **kwargs: P.kwargs
  ) -> tuple[jax.Array, ...]: ...
  @overload
  def __call__(
    self: ArrayFunction[P, Mapping[str, OneArray]], *args: P.args, **kwargs: P.kwargs
  ) -> dict[str, jax.Array]: ...
  @overload
  def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R: ...
  def __call__(self, *args: Any, **kwargs: Any) -> Any:
    """Calls the function, inside or outside compiled code.

    Args:
      *args: pytrees of arrays, or of Python scalars, which become arrays. Other leaves of such a
        pytree, such as a module's functions and strings, are static: the callable gets a pytree of
        the same structure.
      **kwargs: a pytree with an array in it is an argument too. Any other value is static: it must
        be hashable, and reaches the function unchanged.

    A call with other static values needs another program. Numbers, strings and frozen dataclasses
    of these are equal if their types and contents are. Other objects are equal only to themselves.

    Returns:
      A pytree of jax.Arrays, as `out` (or `like`) declares.
    """
    raise_deferred()
    plain = not kwargs and tracing.in_no_trace() and all(map(tracing.is_plain_array, args))
    if plain and not derivatives.may_reuse_call():
      return self._programs.alone(*args)
    return self._core(*args, **kwargs)

  # -- rules -------------------------------------------------------------------------------------
  def defjvp(self, rule: Rule) -> Rule:
    """Defines forward-mode derivatives: `rule(primals, tangents) -> (out, tangent_out)`.

    Works like `jax.custom_jvp.defjvp`. The rule may call this function. It gets the static keyword
    arguments that it has parameters for.

    Returns:
      The rule, so that you can use this method as a decorator.
    """
    self._core.set_jvp(options.function(self._core.label, "defjvp: rule", rule))
    self._defined["defjvp"] = (rule,)
    return rule

  def defvjp(self, fwd: Callable[..., Any], bwd: Callable[..., Any]) -> None:
    """Defines reverse-mode derivatives, as `jax.custom_vjp.defvjp`.

    Args:
      fwd: `fwd(*args) -> (out, residuals)`.
      bwd: `bwd(residuals, cotangent) -> tuple of cotangents`, one for each positional argument.
    """
    given = (("fwd", fwd), ("bwd", bwd))
    forward, backward = (options.function(self._core.label, f"defvjp: {n}", f) for n, f in given)
    self._core.set_vjp(forward, backward)
    self._defined["defvjp"] = (fwd, bwd)

  def deftranspose(self, rule: Rule) -> Rule:
    """Defines the transpose of a linear function (see the option `linear`).

    If `linear` names no arguments, the function counts as linear in all of them from now on.

    Args:
      rule: `rule(cotangent, *args)`, where the linear arguments are ShapeDtypeStructs and the
        others are arrays. It returns the cotangent of the linear argument, or a tuple with the
        cotangents of all linear arguments in order.
    """
    self._core.set_transpose(options.function(self._core.label, "deftranspose: rule", rule))
    self._defined["deftranspose"] = (rule,)
    return rule

  def defvmap(self, rule: Rule) -> Rule:
    """Defines how calls are batched: `rule(axis_size, in_batched, *args) -> (out, out_batched)`.

    Works like `jax.custom_batching.custom_vmap.def_vmap`: batched leaves have a leading axis,
    `in_batched` has the structure of the arguments, and `out_batched` has the structure of the
    result.
    """
    self._core.vmap_rule = options.function(self._core.label, "defvmap: rule", rule)
    self._defined["defvmap"] = (rule,)
    return rule

  def _rules(self) -> dict[str, tuple[Any, ...]] | None:
    return self._defined or None

  def __setstate__(self, rules: dict[str, tuple[Any, ...]]) -> None:
    for method, given in rules.items():
      if method not in self._defined:
        getattr(self, method)(*given)

  def check(self, *args: Any, rtol: float = 1e-5, atol: float = 1e-6, **kwargs: Any) -> None:
    """Compares the results for these arguments with the results of `like`, the reference.

    Args:
      *args: the arguments of a call.
      rtol: relative tolerance, as in `numpy.testing.assert_allclose`.
      atol: absolute tolerance.
      **kwargs: the keyword arguments of a call.

    Raises:
      AssertionError: a result differs; the message has NumPy's table of mismatches.
      GateDefinitionError: `like` is missing, or returns another structure, shape or dtype.
    """
    self._check(args, kwargs, rtol, atol)

  def _check(
    self, args: tuple[Any, ...], kwargs: Mapping[str, Any], rtol: float, atol: float
  ) -> None:
    label = self._core.label
    if self._core.like is None:
      raise GateDefinitionError(f"{label}: check() needs like=, the reference to compare with")
    calls = self(*args, **kwargs), self._core.reference(*args, **kwargs)
    got, want = map(split.split_keys, calls)
    derivatives.check_reference(label, got, want)
    paths = jax.tree_util.tree_flatten_with_path(want)[0]
    for (path, reference), value in zip(paths, jax.tree.leaves(got), strict=True):
      np.testing.assert_allclose(
        np.asarray(value, np.asarray(reference).dtype),
        reference,
        rtol=rtol,
        atol=atol,
        err_msg=f"{label}, result {jax.tree_util.keystr(path)}",
      )

  def verify(self, *args: Any, seconds: float = 10, **kwargs: Any) -> Any:
    """Tests shapes, values, batching, derivatives, shards, export and threads with one call.

    ```python
    import callgate as cg, jax.numpy as jnp, numpy as np

    scale = cg.gate(lambda x, y: x * y, like=lambda x, y: x * y, name="verify.scale")
    report = scale.verify(jnp.array([1.0, 2.0]), jnp.array([0.5, 3.0]), seconds=120)
    print(report)
    report.raise_for_failed()
    ```

    `verify` calls the function a few hundred times, with these values and with similar ones. The
    effects of an io gate happen as often. The questions, in the order of the report, pass if:

    - "shapes": the results have the shapes of `out` or `like`, also for other sizes if these allow
      them.
    - "like": the values equal those of `like`.
    - "vmap": batched calls equal calls lane by lane, for each choice of batched arguments.
    - "jvp": forward mode agrees with finite differences.
    - "vjp": reverse mode agrees with forward mode.
    - "second_order": second derivatives agree with finite differences of the first.
    - "linear": the function is linear in the arguments of `linear`.
    - "effects": programs call the function as often as `effect` and `vmap` say.
    - "shards": split arguments give the same results, on four simulated devices in another process.
    - "export": an exported and reloaded program gives the same results.
    - "pickle": a pickled and reloaded function gives the same results.
    - "escape": the function keeps no view of XLA's memory.
    - "writes": the function leaves its inputs unchanged.
    - "threads": two threads that call the function at once get the same results.

    Args:
      *args: the arguments of a call, of any shapes that the function accepts.
      seconds: the time limit. `verify` starts no question after it, and reports the rest as
        skipped.
      **kwargs: the keyword arguments of a call.

    Returns:
      A `VerifyReport`. An exception in a question fails that question. Questions that don't apply
      are skipped, with the reason.

    Raises:
      GateDefinitionError: `seconds` is not a positive number.
    """
    return _part.load("verifications").verify(self, args, kwargs, seconds)
