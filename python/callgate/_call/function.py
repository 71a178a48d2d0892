# SPDX-License-Identifier: Apache-2.0
"""Functions of arrays that compiled programs call, as users hold them: gates and kernels."""

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

_MOST_PROGRAMS = 1024  # of calls outside of programs that one function keeps
Rule = TypeVar("Rule", bound=Callable[..., Any])


class _EagerPrograms:
  """The programs of calls outside of programs; live as long as the `ArrayFunction`."""

  def __init__(self, core: Operation) -> None:
    self._core = core

  @functools.cached_property
  def _kept(self) -> tuple[Any, Any]:
    return tracing.eager_programs(_MOST_PROGRAMS), tracing.eager_programs(MOST_OBJECTS)

  def of(self, site: CallSite) -> Callable[..., Any]:
    return self._kept[site.has_objects]

  @functools.cached_property
  def alone(self) -> Callable[..., Any]:
    """A program of one call, for arrays alone: JAX dispatches it in C++ from the second time on."""
    core = self._core

    @sources.shared
    def call(*args: Any) -> Any:
      return core(*args)

    call.__name__ = call.__qualname__ = core.name
    return jax.jit(call)


class ArrayFunction(Portable[Any], Generic[P, R]):
  """A function of arrays that compiled programs call; see `Gate` and `Kernel`.

  For type checkers it has the parameters of the function that it was made from, without those for
  results, and returns what that returns, with jax.Arrays for the arrays of any library.
  """

  __slots__ = ("_defined", "_programs")

  def __init__(self, core: Operation) -> None:
    super().__init__(core)
    self._programs = programs = _EagerPrograms(core)
    core.users_programs = weakref.ref(programs)
    if core.wraps is None:
      self.__name__ = core.name  # that of jitted programs
    else:
      functools.update_wrapper(self, core.wraps, updated=())
    if core.call_signature is not None:  # without parameters for results and the context
      self.__signature__ = core.call_signature
    self._defined: dict[str, tuple[Any, ...]] = {}  # rules by the methods that took them

  def __repr__(self) -> str:
    return f"<{self._core.label}>"

  @property
  def name(self) -> str:
    """The name in compiled programs; unique among the live ones of the process."""
    return self._core.name

  @property
  def effect(self) -> Effect:
    """As given: "pure", "io" or "ordered"."""
    return self._core.effect

  @property
  def vmap(self) -> Vmap:
    """As given: how calls are batched; "each" beside a rule."""
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
    plain = not kwargs and tracing.in_no_trace() and all(map(tracing.is_plain_array, args))
    if plain and not derivatives.asked():
      return self._programs.alone(*args)
    return self._core(*args, **kwargs)

  # -- rules -------------------------------------------------------------------------------------
  def defjvp(self, rule: Rule) -> Rule:
    """Defines forward-mode derivatives: `rule(primals, tangents) -> (out, tangent_out)`.

    As `jax.custom_jvp.defjvp`; the rule may call this function. Static keyword arguments are
    passed on to a rule that has parameters for them. Returns the rule, for use as a decorator.
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
    """Defines the transpose of what is linear (see `linear=`).

    Args:
      rule: `rule(cotangent, *args)`, where linear arguments are ShapeDtypeStructs and the others
        arrays; returns the cotangent of the linear argument, or a tuple of them in order.

    Where `linear=` names no arguments, the function counts as linear in all of them from here on.
    """
    self._core.set_transpose(options.function(self._core.label, "deftranspose: rule", rule))
    self._defined["deftranspose"] = (rule,)
    return rule

  def defvmap(self, rule: Rule) -> Rule:
    """Overrides batching: `rule(axis_size, in_batched, *args) -> (out, out_batched)`.

    As `jax.custom_batching.custom_vmap.def_vmap`: batched leaves have a leading axis;
    `in_batched` has the arguments' structure, `out_batched` the result's.
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
    """Compares the results with those of `like`, the reference, on real values.

    Raises:
      AssertionError: a result differs; the message has NumPy's table of mismatches.
      GateDefinitionError: there is no `like`, or it returns another structure, shape or dtype.
    """
    label = self._core.label
    if self._core.like is None:
      raise GateDefinitionError(f"{label}: check() needs like=, the reference to compare")
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
    """Asks everything about it, for one call, and returns a report.

    ```python
    import callgate as cg, jax.numpy as jnp, numpy as np

    scale = cg.gate(lambda x, y: x * y, like=lambda x, y: x * y, name="verify.scale")
    report = scale.verify(jnp.array([1.0, 2.0]), jnp.array([0.5, 3.0]), seconds=120)
    print(report)
    report.raise_for_failed()
    ```

    The callable is called some hundred times, on these values and on others like them. So an io
    gate's effects happen as often. The questions, in the order of the report:

    - "shapes": results are as `out=` or `like=` says, for other sizes, too, where it allows these;
    - "like": values are those of `like=`;
    - "vmap": lanes are as calls lane by lane, whichever arguments have a batch axis;
    - "jvp", "vjp", "second_order": forward mode is as finite differences, reverse mode as forward
      mode, and derivatives of derivatives as finite differences;
    - "linear": it is linear where `linear=` says so;
    - "effects": programs call it as often as `effect=` and `vmap=` say;
    - "shards": split arguments give the same, on four simulated devices, in another process;
    - "export", "pickle": an exported program, and the function's pickle, give the same;
    - "escape", "writes": it keeps no view of XLA's memory, and leaves its inputs as they are;
    - "threads": two threads that call it at once get the same.

    Args:
      *args: those of a call, of any shapes that it takes.
      seconds: no question begins after so many, but is skipped.
      **kwargs: those of a call.

    Returns:
      A `VerifyReport`. An exception in a question is that question's failure, and a question that
      does not apply is skipped, with the reason.

    Raises:
      GateDefinitionError: `seconds` is no number above 0.
    """
    return _part.load("verifications").verify(self, args, kwargs, seconds)
