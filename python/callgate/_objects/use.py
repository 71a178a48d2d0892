# SPDX-License-Identifier: Apache-2.0
"""`callgate.use`: calls of Python callables with the objects that handles refer to."""

from __future__ import annotations

import concurrent.futures
import functools
import json
import types
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from callgate import _part
from callgate._call import shapes
from callgate._call.function import ArrayFunction
from callgate._call.site import CallSite
from callgate._core import callables, exact, registry
from callgate._core import options as check
from callgate._core.errors import GateDefinitionError
from callgate._core.public import core
from callgate._core.where import where
from callgate._gate.callee import GateCallee
from callgate._gate.options import GateOptions, take_options
from callgate._jax import tracing
from callgate._objects import remote, table
from callgate._objects.handle import places
from callgate._objects.hold import PLACES, home_of, on_thread, short
from callgate._objects.resolve import is_handle, name_objects, resolved
from callgate._objects.table import Held, KeptObjects
from callgate._part import Part
from callgate._places import threads
from callgate._places.place import RemoteGate
from callgate._places.workers import Workers

_PREFIX = "use:"  # the prefix of the names of uses that another process can make


class Use(GateCallee):
  """A gate whose callable gets objects instead of handles."""

  kind = "use of"
  traits = GateCallee.traits.but(handles="uses")
  # True if neither a name nor a function's name identifies the callable.
  is_unknown_to_others = False

  @property
  def label(self) -> str:
    if not self.name.startswith(_PREFIX):
      return super().label
    text, _, _ = self.name.removeprefix(_PREFIX).partition("{")
    return f"{self.kind} '{callables.shown(text)}'"

  def handles_in(self, site: CallSite) -> tuple[int, ...]:
    return places(site.spec)

  def check_export(self) -> None:
    if self.is_unknown_to_others:
      raise GateDefinitionError(
        f"jax.export: {self.label}: expected a callable that another process can import: a "
        "function of a module, or a functools.partial, method or object of one, with plain "
        "arguments. For other callables, pass use(..., name=) and trace the same use in the "
        "other process first"
      )

  def bind_remote(self) -> tuple[RemoteGate, Any] | None:
    return None if self.place.is_here else remote.bind(self, self.function)


def use(fn: Callable[..., Any], /, *args: Any, out: Any, **options: Any) -> Any:
  """Calls a Python function from JAX code, with objects in the place of their handles.

  ```python
  import callgate as cg, jax, jax.numpy as jnp

  table = cg.hold(lambda: {1: 10.0, 2: 20.0})()
  look_up = jax.jit(lambda i: cg.use(lambda t, i: t[int(i)], table, i, out=jnp.float32(0)))
  assert look_up(2) == 20
  ```

  For forward-mode derivatives pass `linear=` with the positions of the arguments in which the call
  is linear (handles count). For all other derivatives use `jax.custom_jvp` or `jax.custom_vjp`,
  which take handles as arguments and residuals.

  Args:
    fn: the callable. It runs where the objects live. It gets each handle's object, and the other
      arguments as a gate's callable does. With vmap="whole" a batched handle becomes a list of
      objects.
    *args: pytrees of handles and arrays.
    out: the types of the results, as for `callgate.gate`.
    **options: options of `callgate.gate`. Other keywords are static keyword arguments of the call.

  Returns:
    The results, as `out` declares.

  Raises:
    GateDefinitionError: an option or `out` is wrong.
    HandleError: (fails the program) a handle doesn't refer to a live object of this process.
    BaseException: (fails the program) `fn` raised it; a note names the objects.
  """
  check.function("use", "fn", fn)
  chosen = take_options("use", fn, options)
  if not callable(out) or shapes.is_type(out):
    out = jax.tree.map(_type_of, out, is_leaf=shapes.is_type)
  leaves, tree = jax.tree.flatten(out)
  chosen = _where_objects_live(f"use of {short(fn)}", chosen, (args, options))
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
  """Returns the options of a use, with the place of its handles' objects."""
  handles = [h for h in jax.tree.leaves(given, is_leaf=is_handle) if is_handle(h)]
  if not handles:
    raise GateDefinitionError(
      f"{user}: expected a handle among the arguments, got none; use callgate.gate for a "
      "function of arrays"
    )
  places = list(dict.fromkeys(handle.place for handle in handles))
  if len(places) > 1:
    shown = " and ".join("this process" if one is None else repr(one) for one in places)
    raise GateDefinitionError(f"{user}: expected handles of objects in one place, got {shown}")
  options, place = dict(chosen), places[0]
  if isinstance(asked := options.get("run_on"), concurrent.futures.Executor):
    check.refuse(user, "run_on", PLACES, asked)
  if not isinstance(place, Workers):
    options = on_thread(options, place or threads.objects())
  if "run_on" not in options:
    options["run_on"] = place
  if (asked := home_of(options["run_on"])) is not (place or (asked and threads.objects())):
    where = "'xla' or 'own', since its objects live in this process"
    where = f"{place!r}, where its objects live, or no run_on=" if place else where
    check.refuse(user, "run_on", where, options["run_on"])
  for name in ("retries", "affinity"):
    if options.get(name) and isinstance(place, Workers) and "run_on" not in dict(chosen):
      check.refuse(user, name, f"no {name}=, since it runs where its objects live", options[name])
  return tuple(sorted(options.items()))


def _type_of(value: Any) -> Any:
  if isinstance(value, jax.ShapeDtypeStruct) or not shapes.is_type(value):
    return value
  return jax.ShapeDtypeStruct(value.shape, value.dtype)


def _known(fn: Any, args: Any) -> tuple[Held, ...]:
  """Returns objects that the traced program has as constants, and must keep alive."""
  if not tracing.is_staged():
    return ()
  handles = [h for h in jax.tree.leaves(args, is_leaf=is_handle) if is_handle(h)]
  known = [np.asarray(core(h).words) for h in handles if tracing.is_plain_array(core(h).words)]
  return tuple(
    table.get(one, f"use of {short(fn)}") for some in known for one in some.reshape(-1, table.WORDS)
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
  using = Using(fn, f"use of {short(fn)}", lead, kept)
  if given.get("name") is not None:
    with registry.defining(where()):  # the line may run again with another function
      return ArrayFunction(Use(using, GateOptions(out=out, **given)))
  text = callables.text_of(fn)
  name = None if kept or text is None else _portable_name(text, given)
  given["name"] = registry.unique_name(fn) if name is None else registry.free_name(name)
  made = Use(using, GateOptions(out=out, **given))
  made.is_unknown_to_others = text is None and not isinstance(fn, types.FunctionType)
  return ArrayFunction(made)


def _portable_name(text: str, options: dict[str, Any]) -> str | None:
  """Returns a name that identifies a use's callable and options; None if no name can.

  `text` names the callable. The objects live in the default place.
  """
  chosen = {name: value for name, value in options.items() if value is not None}
  if chosen.get("run_on") is threads.objects():
    del chosen["run_on"]
  if chosen.get("thread") == "xla":
    del chosen["thread"]
  if not all(isinstance(value, str | int | float) for value in chosen.values()):
    return None
  return f"{_PREFIX}{text}{json.dumps(chosen, sort_keys=True) if chosen else ''}"


@_part.joins("uses")
class Uses(Part):
  """Makes the uses that programs of other processes name."""

  def define(self, name: str) -> Any:
    if not name.startswith(_PREFIX):
      return None
    text, _, _ = name.removeprefix(_PREFIX).partition("#")
    place, brace, options = text.partition("{")
    fn = callables.made_of(place)
    chosen = on_thread(json.loads(brace + options) if brace else {}, threads.objects())
    return _use(fn, (), (*chosen.items(), ("name", name)), ())


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
