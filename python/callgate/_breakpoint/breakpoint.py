# SPDX-License-Identifier: Apache-2.0
"""`callgate.breakpoint`: a compiled program that waits for a debugger.

C++ evaluates the predicate, as for a check (src/cells/check.h). If the program continues, no Python
runs.
"""

from __future__ import annotations

import importlib
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from callgate import _callgate
from callgate._call import primitive, shapes
from callgate._call.attached import with_derivative
from callgate._call.site import BoundCall, CallSite
from callgate._core import dtypes, masked, options
from callgate._core.errors import GateDefinitionError
from callgate._core.failures import raise_deferred
from callgate._core.where import Stack, users_stack
from callgate._gate.check import Guarded
from callgate._gate.options import GateOptions
from callgate._jax import refs
from callgate._part import Part, joins
from callgate._runtime import config
from callgate._tap.tap import uncarried

_NAME = "callgate.breakpoint"


class _Breakpoint(Guarded):
  """The gate behind all breakpoints; its callee evaluates the predicate first.

  The first arguments after the predicate are the values that the call returns; the runtime passes
  them on if no debugger opens.
  """

  # A replay stops for the same reasons as the recorded run.
  traits = Guarded.traits.but(located=True, gets_shard=True, taped=False)

  def __init__(self) -> None:
    gate_options = GateOptions(out=_first, name=f"{_NAME}!hit", effect="io")
    super().__init__(_hit, gate_options)
    self.guard = _callgate.Check(_NAME, self.callee, breakpoint=True)


def _first(going_on: Any, returned: Any, values: Any, **static: Any) -> Any:
  del going_on, values, static
  return returned


def _hit(going_on: Any, returned: Any, values: Any, /, *, stack: Stack) -> Any:
  if going_on or not config.looks("breakpoints"):  # another lane stops
    return returned
  session = importlib.import_module("callgate._breakpoint.session")  # imports pdb only here
  given = jax.tree.map(np.array, {**returned, **values})
  return session.stop(stack, given, _callgate.current_place(), tuple(returned))


_making = threading.Lock()
_made: list[_Breakpoint] = []  # guarded by _making; at most one entry


def _gate() -> _Breakpoint:
  with _making:
    if not _made:
      _made.append(_Breakpoint())
    return _made[0]


def breakpoint(when: Any = True, *, out: str | tuple[str, ...] | None = None, **values: Any) -> Any:
  """Stops a compiled program if a condition is true, and opens a debugger at this line.

  ```python
  import callgate as cg, jax, jax.numpy as jnp

  @jax.jit
  def step(x):
    y = jnp.log(x)
    y = cg.breakpoint(~jnp.isfinite(y).all(), out="y", x=x, y=y)
    return y.sum()

  step(jnp.ones(3))             # continues: the condition is false
  cg.config(breakpoints=False)  # switches off all breakpoints, without a new compilation
  step(jnp.zeros(3))
  cg.config(breakpoints=True)
  ```

  **In the debugger** the values are NumPy arrays under their names. `lane` is the lane under vmap
  (a tuple for several vmaps, None without vmap). `shard` is the device's number in a program over
  several devices (None in a `jax.shard_map` over some axes of its mesh). A value of the same name
  hides them. `w`, `u` and `d` show the stack of the code that traced the call. `c` continues. `q`
  ends the program with KeyboardInterrupt.

  **Which debugger opens** follows Python's `breakpoint()`: PYTHONBREAKPOINT or `sys.breakpointhook`
  (ipdb, pytest), else pdb at the terminal or in the notebook's cell. PYTHONBREAKPOINT=0 switches
  breakpoints off. A process without terminal and notebook prints to stderr that it waits for
  `python -m callgate attach`. Programs that reach breakpoints at the same time stop one after
  another.

  **Order.** An operation that doesn't need the result has no fixed order with the breakpoint, and
  may fail before the program stops. Operations on a value returned through `out` run after it.
  Under vmap each lane stops by itself. On a GPU the program waits 20 to 40 µs for each check of the
  condition.

  Args:
    when: a bool of shape (); under vmap each lane has its own.
    out: the name or names of `values` to return, as they are when the program continues.
    **values: pytrees of arrays, by their names in the debugger.

  Returns:
    None; with `out` the value of that name, or a tuple of the values. Derivatives ignore changes
    made in the debugger.

  Raises:
    GateDefinitionError: while tracing: an argument is wrong.
    KeyboardInterrupt: from `callgate.errors()` or `barrier()`, after `q`, as after Ctrl-C.
    ResultError: from the same, if a `sys.breakpointhook` left a wrong value ten times in a row.
  """
  raise_deferred()
  names, values = _names(out, values), refs.read(values)
  stops = shapes.predicate("breakpoint", "when", when)
  gate = _gate()
  returned = {name: values[name] for name in sorted(names)}
  others = {name: values[name] for name in sorted(values) if name not in returned}
  tree = jax.tree.structure(((stops, returned, others), {}))
  own = [_as_array(name, x) for name, value in returned.items() for x in jax.tree.leaves(value)]
  rest = [_as_array(name, x) for name, value in others.items() for x in jax.tree.leaves(value)]
  # A differentiated Python number stays a number.
  arrays = [jnp.asarray(jax.lax.stop_gradient(dtypes.carried(x)[0])) for x in (~stops, *own, *rest)]
  first = arrays[1 : 1 + len(own)]
  site = CallSite(
    tree, jax.tree.structure(returned), (("stack", users_stack()),),
    tuple((tuple(x.shape), x.dtype) for x in first),
  )  # fmt: skip
  shapes.check_call(gate, site, [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays])
  given = primitive.bind(*arrays, call=BoundCall(gate, site))
  if not names:
    return None
  changed = [uncarried(x, y) for x, y in zip(own, given, strict=True)]
  changed = with_derivative(lambda _, own: own, changed, own)  # derivatives of the identity
  after = jax.tree.unflatten(jax.tree.structure(returned), changed)
  return after[out] if isinstance(out, str) else tuple(after[name] for name in names)


def _names(out: Any, values: dict[str, Any]) -> tuple[str, ...]:
  names = (out,) if isinstance(out, str) else out if out is not None else ()
  if not isinstance(names, (tuple, list)) or not all(isinstance(name, str) for name in names):
    options.refuse("breakpoint", "out", "the name of a value, or a tuple of names", out)
  for name in names:
    if name not in values:
      what = f"expected names of values ({', '.join(sorted(values))}), got '{name}'"
      raise GateDefinitionError(f"breakpoint: out: {what}")
  return tuple(dict.fromkeys(names))


def _as_array(name: str, leaf: Any) -> Any:
  try:
    return leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf)
  except (TypeError, ValueError, OverflowError) as error:
    what = f"expected an array or a pytree of arrays, got {masked.shown(leaf)}"
    raise GateDefinitionError(f"breakpoint: {name}: {what}") from error


@joins("breakpoints")
class Breakpoints(Part):
  """Defines the breakpoint for programs from other processes."""

  def define(self, name: str) -> Any:
    return _gate() if name == _NAME else None
