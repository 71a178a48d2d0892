# SPDX-License-Identifier: Apache-2.0
"""`callgate.check`: assertions in compiled programs.

C++ looks at the predicate, so a check that passes costs about a tenth of a microsecond. A check
that fails calls a gate that raises, which stops the program.
"""

from __future__ import annotations

import dataclasses
import re
import string
import threading
import urllib.parse
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from callgate import _callgate, _part
from callgate._call import primitive, shapes
from callgate._call.site import BoundCall, Call, CallSite, Emission
from callgate._core import dtypes, foreign, masked, options, registry
from callgate._core.encoding import is_open
from callgate._core.errors import CheckError, GateDefinitionError
from callgate._core.failures import raise_deferred
from callgate._gate.callee import GateCallee
from callgate._gate.options import GateOptions
from callgate._jax import refs, tracing
from callgate._part import Part
from callgate._runtime import config


class Guarded(GateCallee):
  """A gate behind a callee that reads the first operand and calls the gate if that is False.

  Attributes:
    guard: the callee; programs hold its name.
  """

  guard: _callgate.Check

  def _emission(self, call: Call, *, on_cuda: bool) -> Emission:
    return dataclasses.replace(super()._emission(call, on_cuda=on_cuda), callee=self.guard)


# The static argument with the dtypes of values that travel as other dtypes. The name contains a
# space, so that no value can have it.
_DTYPES = "their dtypes"


def _restored(ok: Any, values: dict[str, Any]) -> dict[str, Any]:
  """Returns the values in the dtypes of the user's arrays: int4 travels as int8."""
  names: Sequence[str | None] | None = values.pop(_DTYPES, None)
  if names is None:
    return values
  leaves, tree = jax.tree.flatten(((ok,), values))
  pairs = zip(leaves, names, strict=True)
  leaves = [x if name is None else x.astype(dtypes.dtype_named(name)) for x, name in pairs]
  return jax.tree.unflatten(tree, leaves)[1]


class Check(Guarded):
  """The gate behind the checks of one message; its callee looks at the predicate first."""

  traits = Guarded.traits.but(taped=False)  # a replay evaluates it again

  def __init__(self, message: str) -> None:
    def fail(ok: Any, /, **values: Any) -> tuple[()]:
      if ok or not config.looks("checks"):  # another lane failed
        return ()
      values = _restored(ok, values)
      try:
        text = _format(message, values)
      except Exception as error:  # noqa: BLE001 - the check has failed, and says so
        why = f"the values below can't be formatted: {foreign.said_by(error)}"
        text = f"{message} ({why})"
      _part.tell("check failed", message, text)
      raise CheckError(text, values)

    unique = registry.free_name("check")
    super().__init__(fail, GateOptions(out=(), name=f"{unique}!failed", effect="io"))
    name = _NAMED + re.sub(r"[%#\[\]]", lambda mark: f"%{ord(mark[0]):02X}", message)
    if _callgate.is_registered(name):  # a live program's
      name = registry.free_name(f"{name}#")
    self.guard = _callgate.Check(name, self.callee)

  def programs(self, site: CallSite) -> Callable[..., Any]:
    del site
    return _programs()


@_part.once
def _programs() -> Callable[..., Any]:
  """Returns the compiled checks outside jit; each call may make a new message."""
  return tracing.eager_programs(128)


_NAMED = "check:"  # and the message, from which another process makes the check
_checks: weakref.WeakValueDictionary[str, Check] = weakref.WeakValueDictionary()  # guarded by _lock
# Checks of exported programs. Guarded by _lock; never emptied: one entry for each check that a
# loaded program names, and nothing reports the end of a loaded program.
_found: list[tuple[Check, _callgate.Check]] = []
_lock = threading.Lock()


def check(predicate: Any, message: str, /, **values: Any) -> None:
  """Stops the program with a `CheckError` if a predicate is False, as an assertion.

  ```python
  import callgate as cg, jax, jax.numpy as jnp

  @jax.jit
  def root(x):
    cg.check(x >= 0, "expected x >= 0, got {x}", x=x)
    return jnp.sqrt(x)

  try:
    with cg.errors():
      root(-1.0)
  except cg.CheckError as error:
    assert error.message == "expected x >= 0, got -1.0"
  ```

  Args:
    predicate: a bool of shape (); under vmap each lane has its own.
    message: the error's text. Fields such as `{x}` show the values of that name.
    **values: arrays for the message; `CheckError.values` has them, too.

  Raises:
    GateDefinitionError: while tracing: the predicate is not a bool of shape (), or the message has
      a field without a value, or a format that arrays of that type don't support.
    CheckError: from `callgate.errors()`, `barrier()` or `last_error()` after the program has
      stopped. Without these, the program raises a `jax.errors.JaxRuntimeError` with the same text.
  """
  raise_deferred()
  options.template("check", "message", message)
  try:
    for _, field, _, _ in string.Formatter().parse(message):
      if field is not None and re.split(r"[.\[]", field)[0] not in values:
        what = f"expected fields among the values, {sorted(values)}, got {{{field}}}"
        raise GateDefinitionError(f"check: message: {what}")
  except ValueError as error:
    what = f"check: message: expected a format string, got {message!r}: {error}"
    raise GateDefinitionError(what) from error
  ok, values = shapes.predicate("check", "predicate", predicate), refs.read(values)
  with _lock:
    gate = _checks.get(message) or _checks.setdefault(message, Check(message))
  for name, value in values.items():
    for leaf in jax.tree.leaves(value):
      try:
        jnp.asarray(leaf)
      except (TypeError, ValueError, OverflowError) as error:
        what = f"check: {name}: expected an array or a pytree of arrays, got {masked.shown(leaf)}"
        raise GateDefinitionError(what) from error
  leaves, tree = jax.tree.flatten(((ok,), values))
  given = [shapes.as_array(gate, x, i, tree) for i, x in enumerate(leaves)]
  carried = [dtypes.carried(x) for x in given]
  arrays = [jax.lax.stop_gradient(x) for x, _ in carried]
  own = tuple(name for _, name in carried)
  site = CallSite(tree, jax.tree.structure(()), ((_DTYPES, own),) if any(own) else (), ())
  shapes.check_call(gate, site, [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays])
  _check_format(message, jax.tree.unflatten(tree, given)[1])
  primitive.bind(*arrays, call=BoundCall(gate, site))


def _check_format(message: str, values: dict[str, Any]) -> None:
  """Raises if the message can't format arrays of these types, whatever their values."""

  def example(x: Any) -> Any:  # zeros of any size that use no memory
    shape = [1 if is_open(extent) else extent for extent in x.shape]
    return np.broadcast_to(np.zeros((), x.dtype), shape)

  types = jax.tree.map(example, values)
  try:
    _format(message, types)
  except Exception as error:
    arrays = [(name, x) for name, value in types.items() for x in jax.tree.leaves(value)]
    shown = ", ".join(f"{name}: {x.dtype.name}{list(x.shape)}" for name, x in arrays)
    what = f"check: message: expected a format that fits the values ({shown}), got {message!r}"
    raise GateDefinitionError(f"{what}: {foreign.said_by(error)}") from error


def _format(message: str, values: dict[str, Any]) -> str:
  with np.printoptions(threshold=100):
    return message.format(**values)


@_part.joins("checks")
class Checks(Part):
  """Defines the checks that programs from other processes name."""

  def define(self, name: str) -> Any:
    if not name.startswith(_NAMED):
      return None
    message = urllib.parse.unquote(name.removeprefix(_NAMED).partition("#")[0])
    with _lock:
      gate = _checks.get(message) or _checks.setdefault(message, Check(message))
      if not _callgate.is_registered(name):
        _found.append((gate, _callgate.Check(name, gate.callee)))
      else:
        _found.append((gate, gate.guard))
    return gate
