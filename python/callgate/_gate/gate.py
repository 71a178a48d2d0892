"""Gates: Python callables that compiled JAX programs call.

`gate` makes one, `call` uses a callable once. What a gate is at run time lives in C++
(src/bindings/gate/gate.cc); here is what a user sees: options, shapes, rules.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypedDict, Unpack, overload

import jax

from callgate import _callgate
from callgate._arrays import bind, gpu
from callgate._call import shapes
from callgate._call.operation import Effect, Operation, Vmap
from callgate._call.site import CallSite
from callgate._core import options as _options
from callgate._core import registry, signatures
from callgate._core.encoding import Level
from callgate._core.errors import GateDefinitionError
from callgate._jax import tracing
from callgate._runtime import targets

Style = Literal["return", "inplace", "context"]
Arrays = Literal["numpy", "buffer", "jax", "torch", "cupy", "numba"]
Thread = Literal["xla", "own"]
_LEADING_PARAMETERS = {"return": 0, "inplace": 1, "context": 2}


class Gate(Operation):
  """A Python callable as a JAX function; made by `callgate.gate`, called like any JAX function.

  Attributes:
    name: what compiled programs call it by; unique among the live gates of the process.
    function: the user's callable.
    effect, style, arrays, vmap, thread: as given to `callgate.gate`.
  """

  kind = "gate"
  native = False  # gets Buffers of a GPU's memory also with arrays that are the host's elsewhere
  same_on_all_platforms = True  # programs for several have no graphs: see `cuda_emission`

  def __init__(
    self,
    function: Callable[..., Any],
    *,
    out: Any = None,
    like: Callable[..., Any] | None = None,
    name: str | None = None,
    effect: Effect = "pure",
    style: Style = "return",
    arrays: Arrays = "numpy",
    aliases: Mapping[int, int] | None = None,
    vmap: Vmap | Callable[..., Any] = "each",
    sharding: Any = None,
    thread: Thread = "xla",
    timeout: float | None = None,
    cast: bool = False,
    copy: bool = False,
    linear: bool | int | Sequence[int] = False,
    gradient: Literal["finite-difference"] | None = None,
    collective: bool = False,
    command_buffer: bool = False,
  ) -> None:
    name = _options.name("gate", name)
    super().__init__(
      name if name is not None else registry.unique_name(function),
      out=out,
      like=like,
      effect=effect,
      aliases=aliases,
      vmap=vmap,
      sharding=sharding,
      linear=linear,
      gradient=gradient,
      collective=collective,
    )
    self.function = function
    self.style: Style = _options.choice(self.label, "style", style, bind.STYLES)
    self.arrays: Arrays = _options.choice(self.label, "arrays", arrays, bind.ARRAY_KINDS)
    self.thread: Thread = _options.choice(self.label, "thread", thread, ("xla", "own"))
    self.timeout = _options.timeout(self.label, timeout)
    self.cast = cast = _options.boolean(self.label, "cast", cast)
    self.copy = copy = _options.boolean(self.label, "copy", copy)
    command_buffer = _options.boolean(self.label, "command_buffer", command_buffer)
    if copy and arrays in gpu.KINDS and arrays not in ("buffer", "torch"):
      raise self._no_copy()
    self.command_buffer = command_buffer
    if command_buffer:
      self._check_command_buffer()
    _options.function(self.label, "fn", function)
    self.parameters = signatures.parameters_of(function, _LEADING_PARAMETERS[style])
    self.callee = _callgate.Callee(
      self.name,
      function,
      bind=functools.partial(bind.bind, function, style, arrays, self.name),
      style=style,
      arrays=bind.runtime_arrays(arrays),
      cast=cast,
      owned_inputs=copy,
      own_thread=thread == "own",
      timeout=self.timeout,
      native=bind.is_native(arrays) or self.native,
      default_stream=arrays == "numba",
      command_buffer=command_buffer,
    )
    registry.register(self.name, self)
    functools.update_wrapper(self, function, updated=())
    signature = signatures.signature_of(function, _LEADING_PARAMETERS[style])
    if signature is not None:  # what callers see has no `out` and no `context`
      self.__signature__ = signature

  def on_host(self, *args: Any, **kwargs: Any) -> Any:
    return self.function(*args, **kwargs)

  def emission(
    self, site: CallSite, avals_in: Sequence[Any], avals_out: Sequence[Any], levels: Any
  ) -> Any:
    del avals_in, avals_out, levels
    return self.callee, targets.GATE_TARGET, {"spec": site.spec}

  def cuda_emission(
    self,
    site: CallSite,
    avals_in: Sequence[Any],
    avals_out: Sequence[Any],
    levels: Any,
    whole: Level | None,
    devices: int,
  ) -> Any:
    del whole, devices
    if self.copy and bind.is_native(self.arrays):
      raise self._no_copy()
    callee, target, attributes = self.emission(site, avals_in, avals_out, levels)
    return callee, targets.GRAPH_TARGET if self.command_buffer else target, attributes

  def _no_copy(self) -> GateDefinitionError:
    return GateDefinitionError(
      f"{self.label}: copy=True: expected arrays in the host's memory (arrays='numpy' or 'jax'; "
      f"'buffer' and 'torch' in programs for the CPU), got arrays={self.arrays!r} on a GPU, which "
      "are XLA's own"
    )

  def _check_command_buffer(self) -> None:
    where = f"{self.label}: command_buffer=True: expected"
    if not bind.is_native(self.arrays):
      kinds = ", ".join(map(repr, gpu.KINDS))
      raise GateDefinitionError(
        f"{where} arrays that stay on the GPU ({kinds}), got arrays={self.arrays!r}, whose copies "
        "the host would have to wait for"
      )
    if self.style == "return":
      raise GateDefinitionError(
        f"{where} style='inplace' or 'context', got style='return', whose results are gone when "
        "their copying is replayed"
      )
    if self.effect != "pure":
      raise GateDefinitionError(
        f"{where} effect='pure', got effect={self.effect!r}: a graph that is replayed does not "
        "call the callable, so its own effects would not happen once per execution"
      )

  def stats(self) -> dict[str, int]:
    """The runtime's counters of this gate; see `callgate.stats`."""
    return self.callee.stats()


class _Options(TypedDict, total=False):
  """The options of `gate`, for the overloads' sake."""

  out: Any
  like: Callable[..., Any] | None
  name: str | None
  effect: Effect
  style: Style
  arrays: Arrays
  aliases: Mapping[int, int] | None
  vmap: Vmap | Callable[..., Any]
  sharding: Any
  thread: Thread
  timeout: float | None
  cast: bool
  copy: bool
  linear: bool | int | Sequence[int]
  gradient: Literal["finite-difference"] | None
  collective: bool
  command_buffer: bool


@overload
def gate(fn: Callable[..., Any], /, **options: Unpack[_Options]) -> Gate: ...


@overload
def gate(
  fn: None = None, /, **options: Unpack[_Options]
) -> Callable[[Callable[..., Any]], Gate]: ...


def gate(
  fn: Callable[..., Any] | None = None,
  /,
  *,
  out: Any = None,
  like: Callable[..., Any] | None = None,
  name: str | None = None,
  effect: Effect = "pure",
  style: Style = "return",
  arrays: Arrays = "numpy",
  aliases: Mapping[int, int] | None = None,
  vmap: Vmap | Callable[..., Any] = "each",
  sharding: Any = None,
  thread: Thread = "xla",
  timeout: float | None = None,
  cast: bool = False,
  copy: bool = False,
  linear: bool | int | Sequence[int] = False,
  gradient: Literal["finite-difference"] | None = None,
  collective: bool = False,
  command_buffer: bool = False,
) -> Any:
  """Makes a Python callable a JAX function: compiled programs call it, with XLA's memory in place.

  ```python
  import callgate as cg, jax.numpy as jnp, numpy as np

  @cg.gate(out=lambda x: x)
  def sort(x):                       # x: read-only NumPy view of XLA's own memory
    return np.sort(x)

  assert sort(jnp.array([3.0, 1.0, 2.0])).tolist() == [1.0, 2.0, 3.0]
  ```

  On a CUDA GPU the program does not run yet when a callable is called: it is being given to a
  stream, XLA's, and the callable gives it more.

  - "buffer", "cupy", "torch" and "numba" arrays are the GPU's own memory, without a copy; "cupy"
    and "numba" exist there alone. Their contents are those of XLA's stream when it has come that
    far. CuPy's and PyTorch's current stream is XLA's, so that plain code of theirs is right. Numba
    has no current stream: a kernel takes `x.stream` of any of the arrays, and one that takes none
    runs on the default stream, which the runtime orders between XLA's work before and after the
    call. With "buffer", consumers of DLPack and of CUDA's array interface make their stream wait
    for XLA's, and XLA's waits for CUDA's default streams when the call ends; for any other stream
    the callable has to make XLA's wait.
  - Nobody waits for the GPU, and the callable need not. None of these libraries has read-only
    arrays: do not write to inputs. `config(check_writes=True)` finds who does, and waits for the
    GPU to do so (not with `command_buffer`).
  - style="return" takes anything with `__dlpack__` or `__cuda_array_interface__` on the program's
    GPU, of the declared shape and dtype, dense and row-major (of CuPy and PyTorch others are made
    so), and copies it on XLA's stream; or NumPy's arrays and scalars, through pinned memory. `cast`
    is for the latter.
  - An array that outlives the call is an error, as on the CPU. But its memory is XLA's again: a
    Buffer then refuses to be used, a jax.Array is deleted, a torch tensor gets a copy, and arrays
    of other libraries must not be used any more.
  - "numpy" and "jax" arrays are copies in the host's memory (of "jax": on JAX's CPU device, since a
    callable must not wait for the device whose program waits for it), through pinned memory. XLA's
    thread waits for the inputs and runs the callable; with thread="own" the stream waits instead,
    XLA's thread goes on, and a failure is kept for `callgate.errors()`, while the results are NaN,
    or zero in integers.
  - thread="own" and `timeout` are for calls on the host's memory: with the GPU's own arrays the
    callable runs on XLA's thread, and has no timeout.
  - With command_buffer=True the callable runs whenever XLA records its program's graph (once for
    each set of addresses that the program's arrays get), and not when the graph is replayed; a
    program whose graph XLA does not want calls it each time. So: launch the same work whatever the
    arrays hold; read nothing on the host, wait for nothing, allocate nothing but from a pool that
    works under capture; stay on XLA's stream, or fork from it and join it again by events; keep
    what the launches use alive for as long as the program. What breaks a recording raises
    `CaptureError`. It needs arrays that stay on the GPU, style="inplace" or "context", and
    effect="pure".

  Args:
    fn: the callable; leave it out to use the result as a decorator.
    out: the results: a pytree of anything with `.shape` and `.dtype`, or a function from the
      arguments' ShapeDtypeStructs to one.
    like: a JAX-traceable reference of the same signature: gives the results' shapes when `out` is
      not given, derivatives when the gate has no rule of its own, and `Gate.check`'s truth.
    name: what programs call the gate by; needed to call exported programs in another process.
      Default: module, qualified name and order of creation.
    effect: "pure" (may be removed, merged, repeated), "io" (runs exactly once per execution, in no
      particular order) or "ordered" (as io, in program order, also across calls of the program).
    style: "return" (`fn(*args)` returns the results, checked strictly and copied once), "inplace"
      (`fn(out, *args)` writes into views of XLA's result memory and returns None) or "context"
      (`fn(context, out, *args)`, with `context.stage`, `.stream`, `.stream_as(library)`,
      `.device`, and `.rank`, `.size`, `.coordinates` of the shard).
    arrays: what the callable gets: "numpy" views, "buffer" (`callgate.Buffer`), "jax" or "torch"
      arrays, all zero-copy on the CPU. Torch has no read-only tensors: do not write to inputs
      (`config(check_writes=True)` finds who does). On a CUDA GPU see below.
    aliases: flat input position to flat output position: both are one memory, in place.
    vmap: "each" (one call a lane, looped over in C++, in lane order), "whole" (one call; batched
      arguments have one leading batch axis, others none), "broadcast" (one call, all arguments
      batched) or a rule as for `Gate.defvmap`. Nested vmaps reach "whole" and "broadcast" gates as
      one folded axis.
    sharding: which dimensions of the arrays may stay split in a program over several devices. None
      or "gather": none, and one device calls for all. "shard": the leading ones that all arrays
      share; each device calls with its part. A rule, as "i k, k j -> i j": dimensions of one name
      are split alike; `[k]`, `_` and what is in no result are whole; `...` are leading dimensions.
      Or a function of the mesh and the operands' ShapeDtypeStructs (with shardings) that returns
      one of these or (PartitionSpecs of operands, of results). Lanes of a vmap are always split.
    thread: "xla" (XLA's calling thread: fastest) or "own" (a thread of callgate's; XLA's is free
      meanwhile, so the callable may itself run JAX programs of any size).
    timeout: seconds after which the program fails with a report, while the callable may go on
      unheeded. Implies thread="own", and private copies of the arrays.
    cast: allow same-kind casts of results (float64 to float32, say).
    copy: arguments are private copies, which the callable may keep, and of NumPy's may write to;
      for arrays in the host's memory. Results' views (`out`) are still XLA's.
    linear: True, a position or positions of arguments in which the gate is linear; see
      `Gate.deftranspose`.
    gradient: "finite-difference": derivatives by central differences, two calls for each input
      element. For small inputs.
    collective: every device makes its call, also where several have the same shard, and a context
      knows its place: `context.rank`, `context.size`, `context.coordinates` on the mesh. For gates
      that talk to each other.
    command_buffer: on a CUDA GPU, lets XLA record what the callable launches into a CUDA graph and
      replay that. Elsewhere it changes nothing. See below.

  Returns:
    A `Gate`, or a decorator that makes one.

  Raises:
    GateDefinitionError: an option is wrong, or shapes are not known.
    ValueError: the name is taken by another live gate.
  """
  options: _Options = {
    "out": out,
    "like": like,
    "name": name,
    "effect": effect,
    "style": style,
    "arrays": arrays,
    "aliases": aliases,
    "vmap": vmap,
    "sharding": sharding,
    "thread": thread,
    "timeout": timeout,
    "cast": cast,
    "copy": copy,
    "linear": linear,
    "gradient": gradient,
    "collective": collective,
    "command_buffer": command_buffer,
  }
  if fn is None:
    return lambda function: Gate(function, **options)
  return Gate(fn, **options)


def call(fn: Callable[..., Any], out: Any, /, *args: Any, **options: Any) -> Any:
  """Calls a Python callable once from (compiled) JAX code: `gate(fn, out=out, **options)(*args)`.

  ```python
  import callgate as cg, jax, jax.numpy as jnp, numpy as np

  y = jax.jit(lambda x: cg.call(np.sort, x, x))(jnp.array([2.0, 1.0]))
  assert y.tolist() == [1.0, 2.0]
  ```

  Args:
    fn: the callable.
    out: as for `gate`.
    *args: the call's arguments.
    **options: options of `gate`; the rest are static keyword arguments of the call.

  Returns:
    The results, as `Gate.__call__`.
  """
  known = set(inspect.signature(gate).parameters)
  gate_options = tuple((key, options[key]) for key in sorted(options) if key in known)
  static = {key: value for key, value in options.items() if key not in known}
  if not callable(out) or shapes.is_type(out):
    out = jax.tree.map(
      lambda t: jax.ShapeDtypeStruct(t.shape, t.dtype), out, is_leaf=shapes.is_type
    )
  leaves, tree = jax.tree.flatten(out)
  try:
    hash((fn, tuple(leaves), gate_options))
  except TypeError:
    return Gate(fn, out=out, **dict(gate_options))(*args, **static)
  return _gate_for(fn, tuple(leaves), tree, gate_options)(*args, **static)


# Outside compiled code the same call comes again and again: one gate serves, so that JAX's caches
# find its program. Emptied by `jax.clear_caches()`.
@tracing.clearable_cache(max_size=64)
def _gate_for(
  fn: Callable[..., Any], leaves: tuple[Any, ...], tree: Any, options: tuple[tuple[str, Any], ...]
) -> Gate:
  return Gate(fn, out=jax.tree.unflatten(tree, leaves), **dict(options))
