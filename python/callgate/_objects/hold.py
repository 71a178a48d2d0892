# SPDX-License-Identifier: Apache-2.0
"""`callgate.hold`: gates that make Python objects on the host."""

# Annotations are evaluated here, for `typing.get_type_hints` of the functions that take these.

import concurrent.futures
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import numpy as np

from callgate import _callgate, _part
from callgate._arrays.torch import to_numpy
from callgate._call.options import Effect
from callgate._core import dtypes, factories, signatures, tape
from callgate._core import options as check
from callgate._core.errors import GateDefinitionError
from callgate._core.public import core
from callgate._core.where import where
from callgate._gate.callee import GateCallee
from callgate._gate.gate import Gate
from callgate._gate.options import Arrays, GateOptions, Thread
from callgate._jax import tracing
from callgate._objects import remote, table
from callgate._objects.handle import SCOPE, TYPE, Handle
from callgate._objects.resolve import is_handle, resolved
from callgate._objects.table import Maker
from callgate._places import threads
from callgate._places.place import RemoteGate
from callgate._places.threads import Thread as OneThread
from callgate._places.workers import Workers, name_of, shared

PLACES = "'xla', 'own', 'processes', callgate.workers(...) or callgate.thread(...)"
Place = Literal["xla", "own", "processes"] | Workers | OneThread | None
_BYTES = TYPE.dtype.itemsize * table.WORDS
_NO_SCOPE = np.zeros(TYPE.shape, TYPE.dtype)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class HoldOptions:
  """The options of `callgate.hold`: the options of a gate that fit a result that is an object.

  Attributes:
    name: the unique name in programs and messages. Default: as for `callgate.gate`.
    effect: "pure", "io" or "ordered", as for `callgate.gate`. XLA may leave out a "pure" call if
      the program doesn't use its handle.
    arrays: the kind of arrays that the callable gets: see `callgate.gate`.
    run_on: where the object is made, used and dropped. Default: `callgate.thread("objects")`; "own"
      means the same. Or another `callgate.thread`; or "processes" or `callgate.workers`, where the
      object lives in the worker that makes it; or "xla", XLA's thread, where the object belongs to
      no thread.
    thread: "own" is another spelling of the default of `run_on`.
    timeout: seconds after which the program fails: see `callgate.gate`.
    copy: True passes private copies of the arguments, which the object may keep. False passes XLA's
      memory (zero-copy); an object that keeps such an array raises an error. Default True.
  """

  name: str | None = None
  effect: Effect = "pure"
  arrays: Arrays = "numpy"
  run_on: Place = None
  thread: Thread = "xla"
  timeout: float | None = None
  copy: bool = True


class HoldCallee(GateCallee):
  """The core of a `Hold`, or of a call that is started."""

  kind = "hold"
  # Recordings see the inner call that makes the object, because handles differ from run to run.
  traits = GateCallee.traits.but(handles="makes", taped=False, located=True)

  def bind_remote(self) -> tuple[RemoteGate, Any] | None:
    return None if self.place.is_here else remote.bind(self, vars(self.function)["there"])

  def apply_raw(self, args: Any, kwargs: dict[str, Any], static: Any) -> Any:
    args, kwargs = jax.tree.map(_without_tangent, (args, kwargs))
    # Made in the trace: JAX can't batch a branch with a constant from outside of a jax.shard_map.
    scope = _NO_SCOPE if tracing.in_no_trace() else jax.lax.full_like(_NO_SCOPE, 0)
    return super().apply_raw(args, {**kwargs, SCOPE: scope}, static)


def holding(
  make: Callable[..., Any], options: GateOptions, named: Callable[[str], str] = str,
  kind: type[HoldCallee] = HoldCallee, solver: str | None = None,
) -> HoldCallee:  # fmt: skip
  """Makes the gate that makes objects; `named` returns the maker's name for the gate's messages.

  `solver` is that of the handles.
  """
  _part.load("scopes")  # loops may contain handles
  # Refers to no gate, because that holds the function below.
  maker, name = list[Maker](), list[str]()
  runs_on = home_of(options.run_on)
  place = _name_of(runs_on)

  def call(*args: Any, **kwargs: Any) -> Handle:
    scope = kwargs.pop(SCOPE)

    def now() -> Any:
      given = resolved(maker[0].label, args), resolved(maker[0].label, kwargs)
      return make(*given[0], **given[1])

    operands = _operands((args, kwargs)) if _callgate.tape() is not None else ()
    value, number = tape.make_object(name[0], operands, now)
    words = table.add(value, maker[0], scope)
    if number is not None:
      tape.objects[words.tobytes()] = number
    return Handle(words, place, solver)

  functools.update_wrapper(call, make)
  call.there = there = Making(make)  # type: ignore[attr-defined]
  run_on = options.run_on if runs_on is None else runs_on
  made = kind(call, dataclasses.replace(options, out=Handle(TYPE, place, solver), run_on=run_on))
  name.append(made.name)
  maker.append(Maker(named(made.name), str(where())))
  there.maker = maker[0]
  return made


def home_of(run_on: Any) -> Workers | OneThread | None:
  """Returns the workers or the thread where objects made there live; None for neither."""
  if _says(run_on, "processes"):
    return shared()
  return run_on if isinstance(run_on, (Workers, OneThread)) else None


def _name_of(runs_on: Workers | OneThread | None) -> str | None:
  """Returns the place's name in the handles of its objects."""
  if isinstance(runs_on, Workers):
    return name_of(runs_on)
  return None if runs_on is None else core(runs_on).as_held


def on_thread(options: dict[str, Any], thread: OneThread) -> dict[str, Any]:
  """Returns the options, with a thread instead of no place or any thread of callgate."""
  own = _says(options.get("thread"), "own")
  asked = options.get("run_on")
  if asked is None or _says(asked, "own") or (own and _says(asked, "xla")):
    return {**options, "run_on": thread, "thread": "xla" if own else options.get("thread", "xla")}
  return options


def _says(value: Any, text: str) -> bool:
  return isinstance(value, str) and value == text


class Making:
  """Makes an object in a worker: a function of the handle's words and the call's arguments."""

  def __init__(self, make: Callable[..., Any], maker: Maker | None = None) -> None:
    self.make = make
    self.maker = maker or Maker(short(make), "")

  def __reduce__(self) -> Any:
    return Making, (self.make, self.maker)

  def __call__(self, handle: Handle, *args: Any, **kwargs: Any) -> None:
    del kwargs[SCOPE]
    label = self.maker.label
    made = self.make(*resolved(label, args), **resolved(label, kwargs))
    table.lend(core(handle).words, made, self.maker)


def _operands(given: Any) -> list[dtypes.Value]:
  """Returns a call's arrays; recorded calls' numbers replace the handles of their objects."""
  found: list[dtypes.Value] = []
  for leaf in map(to_numpy, jax.tree.leaves(given, is_leaf=is_handle)):
    if isinstance(leaf, Handle):
      found.append(of_objects(dtypes.value_of(core(leaf).words)))
    elif isinstance(leaf, (np.ndarray, np.generic, jax.Array)):
      found.append(dtypes.value_of(leaf))
  return found


def of_objects(words: dtypes.Value) -> dtypes.Value:
  """Replaces handles by the numbers of the recorded calls that made their objects."""
  _, shape, data = words
  each = (data[i : i + _BYTES] for i in range(0, len(data), _BYTES))
  numbers = [tape.objects.get(one, tape.UNKNOWN) for one in each]
  return dtypes.value_of(np.array(numbers, np.int64).reshape(shape[:-1]))


def _without_tangent(leaf: Any) -> Any:
  return jax.lax.stop_gradient(leaf) if isinstance(leaf, jax.Array) else leaf


class Hold(Gate[..., Any]):
  """A gate that makes host objects; made by `callgate.hold`. A call returns a `Handle`."""

  _makers = "callgate.hold"


@factories.of_one(HoldOptions)
def hold(make: Callable[..., Any], /, *, options: HoldOptions) -> Hold:
  """Wraps a function that makes Python objects, to which compiled programs refer by handles.

  ```python
  import callgate as cg, jax, jax.numpy as jnp
  from scipy.linalg import lu_factor, lu_solve

  @jax.jit
  def twice(a, b):
    lu = cg.hold(lu_factor)(a)                # factorized once
    x = cg.use(lu_solve, lu, b, out=b)        # used twice
    return cg.use(lu_solve, lu, x, out=b)

  assert jnp.allclose(twice(2 * jnp.eye(3), jnp.ones(3)), 0.25)
  ```

  A handle (`callgate.Handle`) is a value of the program: loops carry it, branches and programs
  return it, and a `jax.custom_vjp` can keep it as a residual. Under `jax.vmap` each lane makes an
  object. callgate keeps the object as long as a program or an array may refer to it. Arguments are
  constants to derivatives.

  Args:
    make: a gate's callable that returns any object.

  Returns:
    A gate: call it with pytrees of arrays, inside or outside compiled code; it returns a `Handle`.

  Raises:
    GateDefinitionError: an option is wrong.
    ValueError: another live gate has the name.
  """
  return held(make, options)


def held(make: Callable[..., Any], options: HoldOptions, solver: str | None = None) -> Hold:
  """Does as `hold`; `solver` is that of the handles."""
  given = {f.name: getattr(options, f.name) for f in dataclasses.fields(options)}
  label = f"hold '{options.name}'" if isinstance(options.name, str) else "hold"
  check.function(label, "make", make)
  if signatures.is_coroutine_function(make):
    raise GateDefinitionError(
      f"{label}: make: expected a function that returns the object, got an async function; call "
      "asyncio.run in a function"
    )
  if isinstance(options.run_on, concurrent.futures.Executor):
    check.refuse(label, "run_on", PLACES, options.run_on)
  maker = f"{solver}.factor" if solver else short(make) if options.name is None else options.name
  given = on_thread(given, threads.objects())
  return Hold(holding(make, GateOptions(out=(), **given), lambda _: maker, solver=solver))


def short(make: Any) -> str:
  make = getattr(make, "func", make)
  return str(getattr(make, "__qualname__", None) or type(make).__qualname__)
