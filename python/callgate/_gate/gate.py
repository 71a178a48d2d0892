# SPDX-License-Identifier: Apache-2.0
"""Gates: Python callables that compiled JAX programs call. This module has the user's side."""

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
  """A Python callable as a JAX function; made by `callgate.gate`, called like any JAX function."""

  _makers = "callgate.gate"

  @property
  def function(self) -> Callable[..., Any]:
    """The user's callable."""
    return self._core.function

  @property
  def style(self) -> Style:
    """As given: "return", "inplace" or "context"."""
    return self._core.style

  @property
  def arrays(self) -> Arrays:
    """As given: the arrays that the callable gets."""
    return self._core.arrays

  @property
  def thread(self) -> Thread:
    """The thread that calls the callable: "xla" or "own"."""
    return "own" if self._core.run_on == "own" else "xla"

  @property
  def run_on(self) -> Any:
    """As given: where the callable runs."""
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
    """The method of an object, as of any function in a class: its first argument is the object."""
    if owner is not None and not issubclass(owner, self._core.live_owners):
      self._core.look_for_owner(owner)
    return self if instance is None else BoundMethod(self, instance)

  def check(self, *args: Any, rtol: float = 1e-5, atol: float = 1e-6, **kwargs: Any) -> None:
    try:
      super().check(*args, rtol=rtol, atol=atol, **kwargs)
    except Exception as error:
      owners = self._core.live_owners
      if owners and not self._core.is_of_object(args):
        call = f"{owners[0].__name__}.{getattr(self, '__name__', 'method')}.check(object, ...)"
        foreign.add_note(error, f"callgate: a method's object is the first argument: {call}")
      raise

  check.__doc__ = ArrayFunction.check.__doc__

  def start(self, *args: P.args, **kwargs: P.kwargs) -> Any:
    """Starts a call, inside or outside compiled code, for the program to go on beside it.

    The callable runs on a thread of callgate's, an `async def` on the one event loop, and that of a
    gate with `run_on=` on its workers or executor; with private copies of the arguments. The call
    is finished, once, and its result waited for once, in the program or, where the ticket is
    dropped, at `callgate.barrier()`, which raises its error.

    Args:
      *args: those of a call.
      **kwargs: those of a call.

    Returns:
      A `Ticket`, a value of the program. Its `result()` waits, and returns what the call returns;
      it has the call's derivatives.

    Raises:
      GateDefinitionError: style is not "return", or effect is "ordered".
    """
    return _part.load("futures").start(self._core, args, kwargs)

  def result(self, ticket: Any) -> Any:
    """`ticket.result()`, of a ticket of this gate's; another's is a GateDefinitionError."""
    return _part.load("futures").result(self._core, ticket)

  def stats(self) -> dict[str, int]:
    """The runtime's counters of this gate; see `callgate.stats`."""
    return self._core.callee.stats()


class ClassGate(Gate[P, R]):
  """A class whose objects live in worker processes, as a gate: `g(x)` calls an object's `__call__`.

  Its other methods are gates, too: `g.step(x)`. All share the objects: one in each worker, made
  there when it is first needed; with affinity="lane" one for each lane. `out` may be a dictionary
  by method.
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
  """The type of `gate`: parameters that take results and the context are none of the gate's."""

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
  """Makes a Python callable a JAX function: compiled programs call it, with XLA's memory in place.

  ```python
  import callgate as cg, jax.numpy as jnp, numpy as np

  @cg.gate(out=lambda x: x)
  def sort(x):                       # x: read-only NumPy view of XLA's own memory
    return np.sort(x)

  assert sort(jnp.array([3.0, 1.0, 2.0])).tolist() == [1.0, 2.0, 3.0]
  ```

  On a CUDA GPU the callable is called while XLA enqueues the program, before the program runs. It
  enqueues its own work on the same stream. The guide "On the GPU" says more:

  - "buffer", "cupy", "torch" and "numba" arrays are the GPU's own memory, without a copy; "cupy"
    and "numba" exist there alone. CuPy's and PyTorch's current stream is XLA's. Numba has none: a
    kernel takes `x.stream`, or runs on the default stream, which is ordered between XLA's work
    before and after the call. With "buffer", consumers of DLPack and of CUDA's array interface wait
    for XLA's stream, and that for CUDA's default streams when the call ends; for others it has to
    be made to.
  - Nobody waits for the GPU, and the callable need not. Do not write to inputs, which none of these
    libraries prevents: `config(check_writes=True)` finds who does (not with `command_buffer`).
  - style="return" takes anything with `__dlpack__` or `__cuda_array_interface__` on the program's
    GPU, of the declared shape and dtype, dense and row-major (CuPy's and PyTorch's are made so),
    and copies it on XLA's stream; or NumPy's arrays and scalars, which alone `cast` is for.
  - An array that outlives the call is an error, and its memory is XLA's again: a Buffer then
    refuses to be used, a torch tensor gets a copy, others must not be used any more.
  - "numpy" and "jax" arrays (of "jax": on JAX's CPU device) are copies in the host's memory. XLA's
    thread waits for the inputs and runs the callable; with thread="own" the stream waits instead,
    and a failure is kept for `callgate.errors()`, while the results are NaN, or zero in integers.
    With the GPU's own arrays the callable runs on XLA's thread, and has no timeout.
  - With command_buffer=True the callable runs when XLA records its program's graph (once for each
    set of addresses that the arrays get), not when the graph is replayed. So: launch the same work
    whatever the arrays hold; read nothing on the host, wait for nothing, allocate from a pool that
    works under capture alone; stay on XLA's stream, or fork from it and join it by events; keep
    what the launches use alive as long as the program. An operation that breaks a recording raises
    `CaptureError`. It needs arrays that stay on the GPU, style="inplace" or "context", and
    effect="pure".

  Args:
    fn: the callable; leave it out to use the result as a decorator.

  Returns:
    A `Gate`, or a decorator that makes one.

  Raises:
    GateDefinitionError: an option is wrong, or shapes are not known.
    ValueError: the name is taken by another live gate.
  """
  return _gate(fn, options)


def _gate(fn: Callable[..., Any], options: GateOptions) -> Gate:
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
  """Calls a Python callable once from (compiled) JAX code: `gate(fn, out=out, **options)(*args)`.

  ```python
  import callgate as cg, jax, jax.numpy as jnp, numpy as np

  y = jax.jit(lambda x: cg.call(np.sort, x, x))(jnp.array([2.0, 1.0]))
  assert y.tolist() == [1.0, 2.0]
  ```

  Args:
    fn: the callable.
    out: the results, which are returned: as for `gate`.
    *args: the call's arguments.
    **options: options of `gate`; the rest are static keyword arguments of the call.
  """
  gate_options = take_options("call", fn, options)
  if not callable(out) or shapes.is_type(out):
    out = jax.tree.map(
      lambda t: jax.ShapeDtypeStruct(t.shape, t.dtype), out, is_leaf=shapes.is_type
    )
  leaves, tree = jax.tree.flatten(out)
  try:
    hash((tuple(leaves), gate_options))
  except TypeError:
    return _gate_of_call(fn, out, gate_options)(*args, **options)
  known = exact.exact_object(fn), exact.exact_tree(tree), exact.exact(gate_options)
  return _gate_for(known[0], tuple(leaves), *known[1:])(*args, **options)


# Outside compiled code the same call comes again and again: one gate serves, so that JAX's caches
# find its program. They are the latest ones, and not kept by their functions: which names are free
# would depend on the collector. Emptied by `jax.clear_caches()`.
@tracing.clearable_cache(max_size=64)
def _gate_for(fn: exact.Exact, leaves: Any, tree: exact.Exact, options: exact.Exact) -> Gate:
  return _gate_of_call(fn.value, jax.tree.unflatten(tree.value, leaves), options.value)


def _gate_of_call(fn: Callable[..., Any], out: Any, options: tuple[tuple[str, Any], ...]) -> Gate:
  """The gate of a `call`, whose line may run again with another function of the same name."""
  with registry.defining(where()):
    return _gate(fn, GateOptions(out=out, **dict(options)))
