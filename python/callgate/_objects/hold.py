# SPDX-License-Identifier: Apache-2.0
"""`callgate.hold` and `callgate.use`: gates that make objects of the host, and that take them."""

# Annotations are evaluated here, for `typing.get_type_hints` of the functions that take these.

import concurrent.futures
import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, Literal

import jax
import numpy as np

from callgate import _callgate, _part
from callgate._arrays.torch import to_numpy
from callgate._call import shapes
from callgate._call.function import ArrayFunction
from callgate._call.options import Effect
from callgate._core import dtypes, exact, factories, tape
from callgate._core import options as check
from callgate._core.errors import GateDefinitionError
from callgate._core.public import core
from callgate._core.where import where
from callgate._gate.callee import GateCallee
from callgate._gate.gate import Gate
from callgate._gate.options import Arrays, GateOptions, Thread, take_options
from callgate._jax import tracing
from callgate._objects import table
from callgate._objects.handle import SCOPE, TYPE, Handle
from callgate._objects.remote import on_workers
from callgate._objects.resolve import is_handle, name_objects, resolved
from callgate._objects.table import Held, KeptObjects, Maker
from callgate._workers import threads
from callgate._workers.threads import Thread as OneThread
from callgate._workers.workers import Workers, name_of, shared

_PLACES = "'xla', 'own', 'processes', callgate.workers(...) or callgate.thread(...)"
Place = Literal["xla", "own", "processes"] | Workers | OneThread | None
_BYTES = TYPE.dtype.itemsize * table.WORDS
_NO_SCOPE = np.zeros(TYPE.shape, TYPE.dtype)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class HoldOptions:
  """The options of `callgate.hold`: those of a gate that make sense where the result is an object.

  Attributes:
    name: what programs and messages call it; unique. Default: as for `callgate.gate`.
    effect: "pure" (a call whose handle is not used may be left out), "io" or "ordered", as for
      `callgate.gate`.
    arrays: what the callable gets: see `callgate.gate`.
    run_on: where the object is made, used and dropped. Default: on `callgate.thread("objects")`,
      and so with "own". Or another `callgate.thread`; or "processes" or `callgate.workers`, where
      it lives in the worker that makes it. "xla": it is made on XLA's thread, and belongs to none.
    thread: "own" is another spelling of the default.
    timeout: seconds after which the program fails: see `callgate.gate`.
    copy: arguments are private copies, which the object may keep; without it they are XLA's memory,
      and an object that keeps one is an error. Default True.
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
  # Recordings hear below of what makes the object: handles differ from run to run.
  traits = GateCallee.traits.but(handles="makes", taped=False)

  def _named_callee(self) -> Any:
    if not isinstance(self.run_on, Workers):
      return super()._named_callee()
    there: Making = vars(self.function)["there"]
    self.elsewhere, callee = on_workers(self, there)
    return callee

  def apply_raw(self, args: Any, kwargs: dict[str, Any], static: Any) -> Any:
    args, kwargs = jax.tree.map(_without_tangent, (args, kwargs))
    # Made in the trace: JAX can't batch a branch with a constant from outside of a jax.shard_map.
    scope = _NO_SCOPE if tracing.in_no_trace() else jax.lax.full_like(_NO_SCOPE, 0)
    return super().apply_raw(args, {**kwargs, SCOPE: scope}, static)


def holding(
  make: Callable[..., Any], options: GateOptions, named: Callable[[str], str] = str,
  kind: type[HoldCallee] = HoldCallee,
) -> HoldCallee:  # fmt: skip
  """The gate that makes objects; `named` gives the maker's name in messages of the gate's."""
  _part.load("scopes")  # a loop may hold them
  maker, name = list[Maker](), list[str]()  # not the gate, which holds the function below
  runs_on = _place(options.run_on)
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
    return Handle(words, place)

  functools.update_wrapper(call, make)
  call.there = there = Making(make)  # type: ignore[attr-defined]
  run_on = options.run_on if runs_on is None else runs_on
  made = kind(call, dataclasses.replace(options, out=Handle(TYPE, place), run_on=run_on))
  name.append(made.name)
  maker.append(Maker(named(made.name), str(where())))
  there.maker = maker[0]
  return made


def _place(run_on: Any) -> Workers | OneThread | None:
  """The workers or the thread where objects live that are made there; None for neither."""
  if _says(run_on, "processes"):
    return shared()
  return run_on if isinstance(run_on, (Workers, OneThread)) else None


def _name_of(runs_on: Workers | OneThread | None) -> str | None:
  """The place, as handles of its objects hold it."""
  if isinstance(runs_on, Workers):
    return name_of(runs_on)
  return None if runs_on is None else core(runs_on).place


def on_thread(options: dict[str, Any], thread: OneThread) -> dict[str, Any]:
  """Options with a thread where none, or any of callgate's, was chosen."""
  own = _says(options.get("thread"), "own")
  asked = options.get("run_on")
  if asked is None or _says(asked, "own") or (own and _says(asked, "xla")):
    return {**options, "run_on": thread, "thread": "xla" if own else options.get("thread", "xla")}
  return options


def _says(value: Any, text: str) -> bool:
  return isinstance(value, str) and value == text


class Making:
  """Makes an object in a worker: a function of the handle's words, and of the call's arguments."""

  def __init__(self, make: Callable[..., Any], maker: Maker | None = None) -> None:
    self.make = make
    self.maker = maker or Maker(_short(make), "")

  def __reduce__(self) -> Any:
    return Making, (self.make, self.maker)

  def __call__(self, handle: Handle, *args: Any, **kwargs: Any) -> None:
    del kwargs[SCOPE]
    label = self.maker.label
    made = self.make(*resolved(label, args), **resolved(label, kwargs))
    table.lend(core(handle).words, made, self.maker)


def _operands(given: Any) -> list[dtypes.Value]:
  """A call's arrays, with the numbers of the recorded calls that made its objects."""
  found: list[dtypes.Value] = []
  for leaf in map(to_numpy, jax.tree.leaves(given, is_leaf=is_handle)):
    if isinstance(leaf, Handle):
      found.append(of_objects(dtypes.value_of(core(leaf).words)))
    elif isinstance(leaf, (np.ndarray, np.generic, jax.Array)):
      found.append(dtypes.value_of(leaf))
  return found


def of_objects(words: dtypes.Value) -> dtypes.Value:
  """In the place of handles: the numbers of the recorded calls that made their objects."""
  _, shape, data = words
  each = (data[i : i + _BYTES] for i in range(0, len(data), _BYTES))
  numbers = [tape.objects.get(one, tape.UNKNOWN) for one in each]
  return dtypes.value_of(np.array(numbers, np.int64).reshape(shape[:-1]))


def _without_tangent(leaf: Any) -> Any:
  return jax.lax.stop_gradient(leaf) if isinstance(leaf, jax.Array) else leaf


class Hold(Gate[..., Any]):
  """A gate that makes objects of the host; made by `callgate.hold`. A call returns a `Handle`."""

  _makers = "callgate.hold"


@factories.of_one(HoldOptions)
def hold(make: Callable[..., Any], /, *, options: HoldOptions) -> Hold:
  """Makes a Python callable one that gives compiled programs objects of the host, by handles.

  ```python
  import callgate as cg, jax, jax.numpy as jnp
  from scipy.linalg import lu_factor, lu_solve

  @jax.jit
  def twice(a, b):
    lu = cg.hold(lu_factor)(a)                # factorised once
    x = cg.use(lu_solve, lu, b, out=b)        # used twice
    return cg.use(lu_solve, lu, x, out=b)

  assert jnp.allclose(twice(2 * jnp.eye(3), jnp.ones(3)), 0.25)
  ```

  A handle (`callgate.Handle`) is a value of the program: loops carry it, branches and programs
  return it, `jax.vmap` makes an object a lane, residuals of a `jax.custom_vjp` hold it. Its object
  lives as long as some program or array may name it, and no longer; the guide says how that is
  known. Arguments are constants to derivatives.

  Args:
    make: called as a gate's callable; returns any object.

  Returns:
    A gate: called with pytrees of arrays, inside or outside compiled code, it returns a `Handle`.

  Raises:
    GateDefinitionError: an option is wrong.
    ValueError: the name is taken by another live gate.
  """
  given = {f.name: getattr(options, f.name) for f in dataclasses.fields(options)}
  label = f"hold '{options.name}'" if isinstance(options.name, str) else "hold"
  check.function(label, "make", make)
  if inspect.iscoroutinefunction(inspect.unwrap(make)):
    raise GateDefinitionError(
      f"{label}: make: expected a function that returns the object, got an async function; "
      "asyncio.run in a function waits for one"
    )
  if isinstance(options.run_on, concurrent.futures.Executor):
    check.refuse(label, "run_on", _PLACES, options.run_on)
  named = (lambda name: name) if options.name is not None else lambda _: _short(make)
  given = on_thread(given, threads.objects())
  return Hold(holding(make, GateOptions(out=(), **given), named))


def _short(make: Any) -> str:
  make = getattr(make, "func", make)
  return str(getattr(make, "__qualname__", None) or type(make).__qualname__)


# -- use -------------------------------------------------------------------------------------------
class Use(GateCallee):
  """A gate whose callable gets objects instead of handles."""

  kind = "use of"
  traits = GateCallee.traits.but(handles="uses")

  def _named_callee(self) -> Any:
    if not isinstance(self.run_on, Workers):
      return super()._named_callee()
    self.elsewhere, callee = on_workers(self, self.function)
    return callee


def use(fn: Callable[..., Any], /, *args: Any, out: Any, **options: Any) -> Any:
  """Calls a Python callable from (compiled) JAX code with the objects that handles stand for.

  ```python
  import callgate as cg, jax, jax.numpy as jnp

  table = cg.hold(lambda: {1: 10.0, 2: 20.0})()
  look_up = jax.jit(lambda i: cg.use(lambda t, i: t[int(i)], table, i, out=jnp.float32(0)))
  assert look_up(2) == 20
  ```

  Derivatives: forward mode with `linear=` (positions of arguments, handles included), and any by
  `jax.custom_jvp` and `jax.custom_vjp`, of which a handle may be an argument or a residual.

  Args:
    fn: gets each handle's object and the other arguments as a gate's callable does. With
      vmap="whole" a batched handle is a list of objects. It runs where they live.
    *args: pytrees of handles and arrays.
    out: the results, which are returned: as for `callgate.gate`.
    **options: options of `callgate.gate`; the rest are static keyword arguments of the call.

  Raises:
    GateDefinitionError: an option is wrong, or `out` is.
    HandleError: (fails the program) a handle is not that of a live object of this process.
    BaseException: what `fn` raises, with a note that says which objects it was given.
  """
  check.function("use", "fn", fn)
  chosen = take_options("use", fn, options)
  if not callable(out) or shapes.is_type(out):
    out = jax.tree.map(_type_of, out, is_leaf=shapes.is_type)
  leaves, tree = jax.tree.flatten(out)
  chosen = _where_objects_live(f"use of {_short(fn)}", chosen, (args, options))
  kept = _known(fn, args)
  try:
    hash((tuple(leaves), chosen))
    cached = not kept
  except TypeError:
    cached = False
  if not cached:
    return _use(fn, out, chosen, kept)(*args, **options)
  key = exact.exact_object(fn), tuple(leaves), exact.exact_tree(tree), exact.exact(chosen)
  return _gate_for(*key)(*args, **options)


def _where_objects_live(user: str, chosen: Any, given: Any) -> tuple[tuple[str, Any], ...]:
  """The options of a use, with the place of its handles' objects."""
  handles = [h for h in jax.tree.leaves(given, is_leaf=is_handle) if is_handle(h)]
  if not handles:
    raise GateDefinitionError(
      f"{user}: expected a handle of an object among the arguments, got none; callgate.gate calls "
      "what takes arrays alone"
    )
  places = list(dict.fromkeys(handle.place for handle in handles))
  if len(places) > 1:
    shown = " and ".join("this process" if one is None else repr(one) for one in places)
    raise GateDefinitionError(
      f"{user}: expected handles of objects that live in one place, got some of {shown}"
    )
  options, place = dict(chosen), places[0]
  if isinstance(asked := options.get("run_on"), concurrent.futures.Executor):
    check.refuse(user, "run_on", _PLACES, asked)
  if not isinstance(place, Workers):
    options = on_thread(options, place or threads.objects())
  if "run_on" not in options:
    options["run_on"] = place
  if (asked := _place(options["run_on"])) is not (place or (asked and threads.objects())):
    where = "'xla' or 'own', as its objects live in this process"
    where = f"{place!r}, where its objects live, or nothing" if place else where
    check.refuse(user, "run_on", where, options["run_on"])
  for name in ("retries", "affinity"):
    if options.get(name) and isinstance(place, Workers) and "run_on" not in dict(chosen):
      check.refuse(user, name, "nothing: it runs where its objects live", options[name])
  return tuple(sorted(options.items()))


def _type_of(value: Any) -> Any:
  if isinstance(value, jax.ShapeDtypeStruct) or not shapes.is_type(value):
    return value
  return jax.ShapeDtypeStruct(value.shape, value.dtype)


def _known(fn: Any, args: Any) -> tuple[Held, ...]:
  """Objects that a program being traced knows as constants, which it has to keep."""
  if not tracing.is_staged():
    return ()
  handles = [h for h in jax.tree.leaves(args, is_leaf=is_handle) if is_handle(h)]
  known = [np.asarray(core(h).words) for h in handles if tracing.is_plain_array(core(h).words)]
  return tuple(
    table.get(one, f"use of {_short(fn)}")
    for some in known
    for one in some.reshape(-1, table.WORDS)
  )


@tracing.clearable_cache(max_size=64)
def _gate_for(
  fn: exact.Exact, leaves: tuple[Any, ...], tree: exact.Exact, chosen: exact.Exact
) -> ArrayFunction[..., Any]:
  return _use(fn.value, jax.tree.unflatten(tree.value, leaves), chosen.value, ())


def _use(
  fn: Any, out: Any, chosen: tuple[Any, ...], kept: tuple[Held, ...]
) -> ArrayFunction[..., Any]:  # fmt: skip
  given = dict(chosen)
  style = given.get("style", "return")
  lead = {"inplace": 1, "context": 2}.get(style, 0) if isinstance(style, str) else 0
  user = f"use of {_short(fn)}"
  using = Using(fn, user, lead, kept)
  return ArrayFunction(Use(using, GateOptions(out=out, **given)))


class Using:
  """Calls a function with objects instead of handles, in this process or in a worker."""

  def __init__(
    self, make: Callable[..., Any], user: str, lead: int = 0, kept: tuple[Held, ...] = ()
  ) -> None:
    self.make, self.user, self.lead = make, user, lead
    self.kept = KeptObjects(kept) if kept else None
    functools.update_wrapper(self, make, updated=())

  def __reduce__(self) -> Any:
    return Using, (self.make, self.user, self.lead)

  def __call__(self, *args: Any, **kwargs: Any) -> Any:
    given = args[self.lead :]
    objects = (*args[: self.lead], *resolved(self.user, given))
    try:
      return self.make(*objects, **resolved(self.user, kwargs))
    except Exception as error:
      name_objects(error, given)
      raise
