# SPDX-License-Identifier: Apache-2.0
"""Gates: Python callables that compiled JAX programs call.

C++ has the run time of a gate (src/bindings/gate/gate.cc); this module has the user's side.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Concatenate, Never, ParamSpec, Protocol, Self, TypeVar, overload

import jax

from callgate import _callgate, _part
from callgate._arrays import bind
from callgate._call import shapes
from callgate._call.generic import AnyArray, Method, P, R
from callgate._call.operation import Operation
from callgate._call.site import Backend, Call, CallSite, Emission
from callgate._call.traits import Traits
from callgate._core import exact, factories, foreign, registry, signatures
from callgate._core import options as _options
from callgate._core.errors import GateDefinitionError
from callgate._gate import annotations, elsewhere
from callgate._gate.options import (
  ContextOptions,
  GateOptions,
  InplaceOptions,
  ReturnOptions,
  no_copy,
  take_options,
)
from callgate._jax import tracing
from callgate._runtime import targets
from callgate._workers import objects
from callgate._workers.threads import Thread

A = ParamSpec("A")
B = ParamSpec("B")
C = ParamSpec("C")
Q = ParamSpec("Q")
T = TypeVar("T")

_LEADING = {"return": 0, "inplace": 1, "context": 2}  # parameters that are none of a call's


class Gate(Operation[P, R]):
  """A Python callable as a JAX function; made by `callgate.gate`, called like any JAX function.

  Attributes:
    name: what compiled programs call it by; unique among the live gates of the process.
    function: the user's callable.
    effect, style, arrays, vmap, thread, run_on: as given to `callgate.gate`.
  """

  kind = "gate"
  traits = Traits(
    knows_lanes=True, one_calls_for_all=True, same_on_all_platforms=True, splits=True, taped=True
  )

  def __init__(self, function: Callable[..., Any], options: GateOptions) -> None:
    name = _options.name("gate", options.name) or registry.unique_name(function)
    registry.take(name)
    label = f"{self.kind} '{name}'"
    _options.function(label, "fn", function)
    self.is_async = inspect.iscoroutinefunction(inspect.unwrap(function))
    annotations.refuse_generators(label, function)
    style: Any = options.style  # not checked yet
    leading = _LEADING.get(style, 0) if isinstance(style, str) else 0
    if options.out is None and options.like is None:
      declared = annotations.results(label, function, leading)
      options = dataclasses.replace(options, out=declared)
    options = options.checked(label)
    super().__init__(name, options)
    self.function = function
    self.style, self.arrays, self.run_on = options.style, options.arrays, options.run_on
    self.thread = "own" if self.run_on == "own" else "xla"
    self.timeout = options.timeout or 0.0
    self.is_here = isinstance(self.run_on, str | Thread)  # in this process
    if self.is_async and not isinstance(self.run_on, str):
      raise GateDefinitionError(
        f"{label}: run_on={self.run_on!r}: expected a function, got an async function; those run "
        "on this process's event loop"
      )
    self.affinity, self._place = options.affinity, (options.retries, options.in_flight)
    self.elsewhere: Any = None
    self.cast, self.copy = options.cast, options.copy
    self.collective, self.command_buffer = options.collective, options.command_buffer
    self.parameters = tuple(p.name for p in signatures.positional(function, leading))
    self.defaults = signatures.defaults(function, leading)
    self.traits = self.traits.but(
      by_lane=self.traits.by_lane or self.affinity is not None,
      of_thread=isinstance(self.run_on, Thread),
      on_device=bind.is_native(self.arrays) or self.traits.native,
    )
    self.callee = self._named_callee()
    registry.register(self.name, self)
    functools.update_wrapper(self, function, updated=())
    signature = signatures.signature_of(function, leading)
    if signature is not None:  # what callers see has no `out` and no `context`
      self.__signature__ = signature

  def __set_name__(self, owner: type, name: str) -> None:
    del name
    self.owner = weakref.ref(owner)

  @overload
  def __get__(self, instance: None, owner: type | None = None) -> Self: ...
  @overload
  def __get__(
    self: Gate[Concatenate[Any, Q], T], instance: object, owner: type | None = None
  ) -> Method[Q, T]: ...
  def __get__(self, instance: Any, owner: type | None = None) -> Any:
    """The method of an object, as of any function in a class: its first argument is the object."""
    if self.owner is None:  # typing.NamedTuple calls no __set_name__ before Python 3.13
      for kind in getattr(owner, "__mro__", ()):
        if any(value is self for value in vars(kind).values()):
          self.owner = weakref.ref(kind)
    return self if instance is None else types.MethodType(self, instance)

  def _named_callee(self) -> Any:
    if not self.is_here:
      self.elsewhere, callee = elsewhere.callee(self, *self._place)
      return callee
    return _callgate.Callee(
      self.name, self.function, style=self.style, timeout=self.timeout,
      bind=functools.partial(bind.bind, self.function, self.style, self.arrays, self.name),
      arrays="numpy" if self.arrays == "numpy" else "buffer",
      owned_inputs=self.copy, own_thread=self.thread == "own",
      native=self.traits.on_device,
      default_stream=self.arrays == "numba", command_buffer=self.command_buffer,
      located=self.traits.located or self.traits.by_lane,
      taped=self.traits.taped,
      thread=self.run_on.callee if isinstance(self.run_on, Thread) else None,
    )  # fmt: skip

  def check_call(self, site: CallSite, structs: Sequence[Any]) -> None:
    super().check_call(site, structs)
    if self.elsewhere is not None and not site.by_jax:
      self.elsewhere.prepare()

  def rename(self, name: str) -> None:
    self.callee.give_up_name()
    self.name = name
    self.callee = self._named_callee()

  def on_host(self, *args: Any, **kwargs: Any) -> Any:
    call = functools.partial(self.function, *args, **kwargs)
    return self.run_on.run(call) if isinstance(self.run_on, Thread) else call()

  def on_lane(self, lane: int, call: Callable[[], Any]) -> Any:
    return objects.on_lane(lane, call) if self.traits.by_lane else call()

  def backend(self, platform: str) -> Backend:
    return functools.partial(self._emission, on_cuda=platform == "cuda")

  def _emission(self, call: Call, *, on_cuda: bool) -> Emission:
    if on_cuda and self.copy and self.is_here and bind.is_native(self.arrays):
      raise no_copy(self.label, self.arrays)
    target = targets.GRAPH_TARGET if on_cuda and self.command_buffer else targets.GATE_TARGET
    cast = {"cast": "yes"} if call.site.cast else {}
    return Emission(self.callee, target, {"spec": call.site.spec, **cast}, call)

  def check(self, *args: Any, rtol: float = 1e-5, atol: float = 1e-6, **kwargs: Any) -> None:
    try:
      super().check(*args, rtol=rtol, atol=atol, **kwargs)
    except Exception as error:
      owner = self.owner and self.owner()
      if owner is not None and not self.is_of_object(args):
        call = f"{owner.__name__}.{getattr(self, '__name__', 'method')}.check(object, ...)"
        foreign.add_note(error, f"callgate: a method's object is the first argument: {call}")
      raise

  check.__doc__ = Operation.check.__doc__

  def apply_raw(self, args: tuple[Any, ...], kwargs: dict[str, Any], static: Any) -> Any:
    if self.is_async:
      raise GateDefinitionError(
        f"{self.label} is an async function, which a call would have to wait for; expected "
        "ticket = gate.start(...) and, later, ticket.result()"
      )
    return super().apply_raw(args, kwargs, static)

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
    return _part.load("futures").start(self, args, kwargs)

  def result(self, ticket: Any) -> Any:
    """`ticket.result()`, of a ticket of this gate's; another's is a GateDefinitionError."""
    return _part.load("futures").result(self, ticket)

  def stats(self) -> dict[str, int]:
    """The runtime's counters of this gate; see `callgate.stats`."""
    return self.callee.stats()


class ClassGate(Gate[P, R]):
  """A class whose objects live in worker processes, as a gate: `g(x)` calls an object's `__call__`.

  Its other methods are gates, too: `g.step(x)`. All share the objects: one in each worker, made
  there when it is first needed; with affinity="lane" one for each lane. `out` may be a dictionary
  by method.
  """

  def __init__(self, made: Callable[..., Any], options: GateOptions) -> None:
    self._objects = objects.Instances(made, options.affinity == "lane")
    self._class: type = objects.class_of(made)
    self._given = options
    self._methods: dict[str, Gate] = {}
    self._outs = elsewhere.outs_by_method(self._class, options.out)
    name = options.name if options.name is not None else registry.unique_name(made)
    super().__init__(
      objects.MethodOf(self._objects, "__call__"),
      dataclasses.replace(options, name=name, out=self._out_of("__call__")),
    )

  def _out_of(self, method: str) -> Any:
    if self._outs is None:
      return self._given.out
    return self._outs.get(method, functools.partial(elsewhere.no_results, self._class, method))

  def __getattr__(self, name: str) -> Gate:
    if name.startswith("_") or not callable(getattr(self._class, name, None)):
      raise AttributeError(f"{self.label} has no method or attribute '{name}'")
    if name not in self._methods:
      options = dataclasses.replace(
        self._given, name=registry.free_name(f"{self.name}.{name}"), out=self._out_of(name)
      )
      self._methods[name] = Gate(objects.MethodOf(self._objects, name), options).handle()
    return self._methods[name]


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
  if elsewhere.has_objects(fn, options.run_on):
    return ClassGate(fn, options)
  return Gate(fn, options)


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
    return gate(fn, out=out, **dict(gate_options))(*args, **options)
  known = exact.exact_object(fn), exact.exact_tree(tree), exact.exact(gate_options)
  return _gate_for(tuple(leaves), *known)(*args, **options)


# Outside compiled code the same call comes again and again: one gate serves, so that JAX's caches
# find its program. Emptied by `jax.clear_caches()`.
@tracing.clearable_cache(max_size=64)
def _gate_for(leaves: Any, fn: exact.Exact, tree: exact.Exact, options: exact.Exact) -> Gate:
  return gate(fn.value, out=jax.tree.unflatten(tree.value, leaves), **dict(options.value))
