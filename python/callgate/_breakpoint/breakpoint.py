# SPDX-License-Identifier: Apache-2.0
"""`callgate.breakpoint`: a compiled program that waits for a debugger.

As a check, it is decided in C++ (src/cells/check.h): where a program goes on, Python isn't called.
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
  """The gate behind all breakpoints; its callee looks at the predicate first.

  The first arguments, behind the predicate, are the values that come back: the runtime hands
  them on where nobody stops.
  """

  # Nobody stops in a replay for another reason than in the run.
  traits = Guarded.traits.but(located=True, told_shard=True, taped=False)

  def __init__(self) -> None:
    gate_options = GateOptions(out=_first, name=f"{_NAME}!hit", effect="io")
    super().__init__(_hit, gate_options)
    self.guard = _callgate.Check(_NAME, self.callee, breakpoint=True)


def _first(going_on: Any, returned: Any, values: Any, **static: Any) -> Any:
  del going_on, values, static
  return returned


def _hit(going_on: Any, returned: Any, values: Any, /, *, stack: Stack) -> Any:
  if going_on or not config.looks("breakpoints"):  # of several lanes, one that does not stop
    return returned
  session = importlib.import_module("callgate._breakpoint.session")  # pdb is for who stops
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
  """Has the (compiled) program wait, where a condition is true, and opens a debugger.

  ```python
  import callgate as cg, jax, jax.numpy as jnp

  @jax.jit
  def step(x):
    y = jnp.log(x)
    y = cg.breakpoint(~jnp.isfinite(y).all(), out="y", x=x, y=y)
    return y.sum()

  step(jnp.ones(3))             # goes on: a look at the condition is all it takes
  cg.config(breakpoints=False)  # none stops from here on, without a new compilation
  step(jnp.zeros(3))
  cg.config(breakpoints=True)
  ```

  pdb opens at the line of the call. There the values are NumPy arrays under their names, `lane` is
  the lane under vmap (a tuple of several vmaps; None without) and `shard` the device's number in
  a program over several (None in a `jax.shard_map` over some axes of its mesh), if none of the
  values has that name; `w`, `u` and `d` go through the stack of the code that traced the call. `c`
  goes on. `q` ends the program with KeyboardInterrupt.

  The debugger is what Python's own `breakpoint()` runs, where PYTHONBREAKPOINT or
  `sys.breakpointhook` says so (ipdb, pytest's); PYTHONBREAKPOINT=0 has the program go on. Else it
  is pdb at the terminal or in the notebook's cell. A process that has neither says on stderr that
  it waits for `python -m callgate attach`. Programs that come to breakpoints at once stop one after
  another.

  An operation that doesn't need the result is in no order with the breakpoint, and may fail before
  the program gets there; with `out` operations on the returned value come after it. Under vmap each
  lane stops by itself. On a GPU the program waits for every look, 20 to 40 µs.

  Args:
    when: a traced bool of shape (); under vmap each lane's.
    out: names among `values`; what they are when the program goes on is returned.
    **values: pytrees of arrays, by the names that they have in the debugger.

  Returns:
    None; with `out` the value of that name, or a tuple of the values. Derivatives are as if nobody
    changed it.

  Raises:
    GateDefinitionError: while tracing: an argument is wrong.
    KeyboardInterrupt: from `callgate.errors()` or `barrier()`, after `q`, as after Ctrl-C.
    ResultError: likewise, after a `sys.breakpointhook` that left a wrong value ten times in a row.
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
  # A Python number that is differentiated leaves a number.
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
  changed = with_derivative(lambda _, own: own, changed, own)  # as if they were the same
  after = jax.tree.unflatten(jax.tree.structure(returned), changed)
  return after[out] if isinstance(out, str) else tuple(after[name] for name in names)


def _names(out: Any, values: dict[str, Any]) -> tuple[str, ...]:
  names = (out,) if isinstance(out, str) else out if out is not None else ()
  if not isinstance(names, (tuple, list)) or not all(isinstance(name, str) for name in names):
    options.refuse("breakpoint", "out", "a name among the values, or a tuple of them", out)
  for name in names:
    if name not in values:
      what = f"'{name}' is not among the values, {sorted(values)}"
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
  """Defines the breakpoint of programs of other processes."""

  def define(self, name: str) -> Any:
    return _gate() if name == _NAME else None
