# SPDX-License-Identifier: Apache-2.0
"""Gates: Python callables that compiled JAX programs call. This module has the public classes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Concatenate, Never, ParamSpec, Protocol, Self, TypeVar, overload

import jax

from callgate import _part
from callgate._call import shapes
from callgate._call.function import ArrayFunction
from callgate._call.generic import AnyArray, Method, P, R
from callgate._core import exact, factories, foreign, registry
from callgate._core.bound import BoundMethod
from callgate._core.where import where
from callgate._gate import classes
from callgate._gate.callee import GateCallee
from callgate._gate.options import (
  Arrays,
  ContextOptions,
  GateOptions,
  InplaceOptions,
  ReturnOptions,
  Style,
  Thread,
  take_options,
)
from callgate._jax import tracing

A = ParamSpec("A")
B = ParamSpec("B")
C = ParamSpec("C")
Q = ParamSpec("Q")
T = TypeVar("T")


class Gate(ArrayFunction[P, R]):
  """A Python function that compiled programs call; `callgate.gate` makes one."""

  _makers = "callgate.gate"

  @property
  def function(self) -> Callable[..., Any]:
    """The wrapped Python callable."""
    return self._core.function

  @property
  def style(self) -> Style:
    """The option `style`: "return", "inplace" or "context"."""
    return self._core.style

  @property
  def arrays(self) -> Arrays:
    """The option `arrays`: the kind of arrays that the callable gets."""
    return self._core.arrays

  @property
  def thread(self) -> Thread:
    """The thread that runs the callable: "xla" or "own"."""
    return "own" if self._core.run_on == "own" else "xla"

  @property
  def run_on(self) -> Any:
    """The option `run_on`: where the callable runs."""
    return self._core.run_on

  def __set_name__(self, owner: type, name: str) -> None:
    del name
    self._core.add_owner(owner)

  @overload
  def __get__(self, instance: None, owner: type | None = None) -> Self: ...
  @overload
  def __get__(
    self: Gate[Concatenate[Any, Q], T], instance: object, owner: type | None = None
  ) -> Method[Q, T]: ...
  def __get__(self, instance: Any, owner: type | None = None) -> Any:
    """Binds the gate to an object, as Python does for functions in a class."""
    if owner is not None and not issubclass(owner, self._core.live_owners):
      self._core.look_for_owner(owner)
    return self if instance is None else BoundMethod(self, instance)

  def _check(
    self, args: tuple[Any, ...], kwargs: Mapping[str, Any], rtol: float, atol: float
  ) -> None:
    try:
      super()._check(args, kwargs, rtol, atol)
    except Exception as error:
      owners = self._core.live_owners
      if owners and not self._core.is_of_object(args):
        call = f"{owners[0].__name__}.{getattr(self, '__name__', 'method')}.check(object, ...)"
        foreign.add_note(error, f"callgate: pass the method's object as the first argument: {call}")
      raise

  def start(self, *args: P.args, **kwargs: P.kwargs) -> Any:
    """Starts an asynchronous call, inside or outside jit; the program doesn't wait for it.

    ```python
    import callgate as cg, jax

    slow = cg.gate(lambda x: x + 1, out=lambda x: x)

    @jax.jit
    def program(x):
      first, second = slow.start(x), slow.start(2 * x)  # both run at the same time
      return first.result() + second.result()

    assert program(1.0) == 5.0
    ```

    The callable runs on a thread of callgate, on the workers or the executor of `run_on`, or, if it
    is an `async def`, on callgate's event loop. It gets private copies of the arguments. Each call
    runs exactly once, also if the program never asks for its result. `callgate.barrier()` then
    waits for the call and raises its error.

    Args:
      *args: the arguments of a call.
      **kwargs: the keyword arguments of a call.

    Returns:
      A `Ticket`, a pytree. `ticket.result()` waits for the call and returns its result. It is
      differentiable as the call is.

    Raises:
      GateDefinitionError: `style` is not "return", or `effect` is "ordered".
    """
    return _part.load("futures").start(self._core, args, kwargs)

  def result(self, ticket: Any) -> Any:
    """Returns `ticket.result()`.

    Raises:
      GateDefinitionError: another gate started the call.
    """
    return _part.load("futures").result(self._core, ticket)

  def stats(self) -> dict[str, int]:
    """Returns the runtime's counters of this gate; see `callgate.stats`."""
    return self._core.callee.stats()


class ClassGate(Gate[P, R]):
  """A gate of a class whose objects live in worker processes; `g(x)` calls an object.

  The class's other methods are gates, too: `g.step(x)`. Each worker makes one object, on the first
  call that needs it; with affinity="lane" there is one object for each lane. `out` may be a
  dictionary by method.
  """

  def __getattr__(self, name: str) -> Gate:
    if name.startswith("_"):
      raise AttributeError(f"{self!r} has no attribute '{name}'")
    if (core := self._core.member(name)) is None:
      raise AttributeError(f"{self._core.label} has no method or attribute '{name}'")
    made = Gate(core)
    setattr(self, name, made)
    return made


class MakesGates(Protocol[A, B, C]):
  """The type of `gate`: a gate lacks its callable's parameters for results and the context."""

  @overload
  def __call__(
    self, fn: Callable[Concatenate[Any, Q], Any], /, *args: A.args, **options: A.kwargs
  ) -> Gate[Q, Any]: ...
  @overload
  def __call__(
    self, fn: None = None, /, *args: A.args, **options: A.kwargs
  ) -> Callable[[Callable[Concatenate[Any, Q], Any]], Gate[Q, Any]]: ...
  @overload
  def __call__(
    self, fn: Callable[Concatenate[Any, Any, Q], Any], /, *args: B.args, **options: B.kwargs
  ) -> Gate[Q, Any]: ...
  @overload
  def __call__(
    self, fn: None = None, /, *args: B.args, **options: B.kwargs
  ) -> Callable[[Callable[Concatenate[Any, Any, Q], Any]], Gate[Q, Any]]: ...
  @overload
  def __call__(self, fn: Callable[Q, T], /, *args: C.args, **options: C.kwargs) -> Gate[Q, T]: ...
  @overload
  def __call__(
    self, fn: None = None, /, *args: C.args, **options: C.kwargs
  ) -> Callable[[Callable[Q, T]], Gate[Q, T]]: ...


def _decorator(
  *styles: *tuple[Callable[A, Any], Callable[B, Any], Callable[C, Any]],
) -> Callable[[Callable[..., Any]], MakesGates[A, B, C]]:
  del styles
  return factories.decorator(GateOptions)


@_decorator(InplaceOptions, ContextOptions, ReturnOptions)
def gate(fn: Callable[..., Any], /, *, options: GateOptions) -> Gate:
  """Wraps a Python function so that compiled JAX programs can call it, without copies of arguments.

  ```python
  import callgate as cg, jax.numpy as jnp, numpy as np

  @cg.gate(out=lambda x: x)
  def sort(x):                       # x: read-only NumPy view of XLA's memory
    return np.sort(x)

  assert sort(jnp.array([3.0, 1.0, 2.0])).tolist() == [1.0, 2.0, 3.0]
  ```

  Declare the results' shapes and dtypes by `out=` or `like=`, and pass `effect=` if the callable
  does more than compute its results.

  Args:
    fn: the callable; leave it out to use the result as a decorator.

  Returns:
    A `Gate`, or a decorator that makes one.

  Raises:
    GateDefinitionError: an option is wrong, or no option gives the results' shapes.
    ValueError: another live gate has the name.
  """
  return _gate(fn, options)


def _gate(fn: Callable[..., Any], options: GateOptions) -> Gate:
  options = options.by_default()
  if classes.has_objects(fn, options.run_on):
    classes.refuse_hidden(fn, options.out, {name for name in dir(Gate) if name[0] != "_"})
    return ClassGate(classes.ClassGateCallee(fn, options))
  return Gate(GateCallee(fn, options))


@overload
def call(fn: Callable[..., Any], out: Never, /, *args: Any, **options: Any) -> Any: ...
@overload
def call(fn: Callable[..., Any], out: AnyArray, /, *args: Any, **options: Any) -> jax.Array: ...
@overload
def call(
  fn: Callable[..., Any], out: tuple[AnyArray, ...], /, *args: Any, **options: Any
) -> tuple[jax.Array, ...]: ...
@overload
def call(
  fn: Callable[..., Any], out: Mapping[str, AnyArray], /, *args: Any, **options: Any
) -> dict[str, jax.Array]: ...
@overload
def call(fn: Callable[..., Any], out: Any, /, *args: Any, **options: Any) -> Any: ...
def call(fn: Callable[..., Any], out: Any, /, *args: Any, **options: Any) -> Any:
  """Calls a Python function once from JAX code: `gate(fn, out=out, **options)(*args)`.

  ```python
  import callgate as cg, jax, jax.numpy as jnp, numpy as np

  y = jax.jit(lambda x: cg.call(np.sort, x, x))(jnp.array([2.0, 1.0]))
  assert y.tolist() == [1.0, 2.0]
  ```

  Args:
    fn: the callable.
    out: the types of the results, as for `gate`.
    *args: the arguments of the call.
    **options: options of `gate`. Other keywords are static keyword arguments of the call.

  Returns:
    The results, as `out` declares.
  """
  gate_options = take_options("call", fn, options)
  if not callable(out) or shapes.is_type(out):
    out = jax.tree.map(
      lambda t: jax.ShapeDtypeStruct(t.shape, t.dtype) if shapes.is_type(t) else t,
      out, is_leaf=shapes.is_type,
    )  # fmt: skip
  leaves, tree = jax.tree.flatten(out)
  try:
    hash((tuple(leaves), gate_options))
  except TypeError:
    return _gate_of_call(fn, out, gate_options)(*args, **options)
  known = exact.exact_object(fn), exact.exact_tree(tree), exact.exact(gate_options)
  return _gate_for(known[0], tuple(leaves), *known[1:])(*args, **options)


# Equal calls outside compiled code share one gate, so that JAX's caches find its program. The cache
# keeps the latest gates. Functions do not keep their gates, because the garbage collector would
# then decide which names are free. `jax.clear_caches()` empties the cache.
@tracing.clearable_cache(max_size=64)
def _gate_for(fn: exact.Exact, leaves: Any, tree: exact.Exact, options: exact.Exact) -> Gate:
  return _gate_of_call(fn.value, jax.tree.unflatten(tree.value, leaves), options.value)


def _gate_of_call(fn: Callable[..., Any], out: Any, options: tuple[tuple[str, Any], ...]) -> Gate:
  """Makes the gate of a `call`, whose line may run again with another function of the same name."""
  with registry.defining(where()):
    return _gate(fn, GateOptions(out=out, **dict(options)))
