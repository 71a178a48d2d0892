# SPDX-License-Identifier: Apache-2.0
"""`verify` of gates and kernels, and `callgate.verify_all` for a module."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from callgate import _part
from callgate._call.function import ArrayFunction
from callgate._core import options, spellings
from callgate._core.errors import GateDefinitionError
from callgate._core.public import core
from callgate._part import Part, Phase, Wait
from callgate._verify import derivatives, questions, travel
from callgate._verify.report import VerifyReport, VerifyResult
from callgate._verify.subject import Fault, NotAsked, Subject, said

# The questions by name, in the order of a report.
QUESTIONS: dict[str, Callable[[Subject], str]] = {
  "shapes": questions.shapes,
  "like": questions.like,
  "vmap": questions.vmap,
  "jvp": derivatives.jvp,
  "vjp": derivatives.vjp,
  "second_order": derivatives.second_order,
  "linear": derivatives.linear,
  "effects": questions.effects,
  "shards": travel.shards,
  "export": travel.export,
  "pickle": travel.pickled,
  "escape": questions.escape,
  "writes": questions.writes,
  "threads": questions.threads,
}
_LAST = "shards"  # asked last, as it takes longer than all others
_OF_OBJECTS = "its results are handles of objects, which can't be compared"
_ASYNC = "an async function is started, not called"


def verify(
  function: ArrayFunction[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], seconds: float
) -> VerifyReport:
  """Runs all questions on a call; see `ArrayFunction.verify`."""
  label = core(function).label
  wait = Wait(options.seconds(f"{label}: verify", "seconds", seconds))
  if core(function).traits.handles:
    return _skipped(label, _OF_OBJECTS)
  if getattr(core(function), "is_async", False):
    return _skipped(label, _ASYNC)
  subject = Subject(function, args, kwargs)
  late = f"out of time (seconds={seconds:g})"
  answers = {
    name: _answer(name, QUESTIONS[name], subject)
    if wait.left or (subject.blocked and subject.blocked[0] == name)
    else VerifyResult(name, ok=True, skipped=late)
    for name in sorted(QUESTIONS, key=_LAST.__eq__)
  }
  return VerifyReport(label, tuple(answers[name] for name in QUESTIONS))


def _answer(name: str, question: Callable[[Subject], str], subject: Subject) -> VerifyResult:
  if subject.blocked is not None:
    failed, message = subject.blocked
    if failed == name:
      return VerifyResult(name, ok=False, message=message)
    return VerifyResult(name, ok=True, skipped=f"not asked after the failure of '{failed}'")
  try:
    return VerifyResult(name, ok=True, message=question(subject))
  except NotAsked as reason:
    return VerifyResult(name, ok=True, skipped=str(reason))
  except Fault as fault:
    return VerifyResult(name, ok=False, message=str(fault))
  except Exception as error:  # noqa: BLE001 - a question's failure
    return VerifyResult(name, ok=False, message=said(error))


def _skipped(label: str, reason: str) -> VerifyReport:
  return VerifyReport(label, tuple(VerifyResult(n, ok=True, skipped=reason) for n in QUESTIONS))


def verify_all(module: Any, seconds: float = 10, /, **arguments: Any) -> dict[str, VerifyReport]:
  """Verifies each gate, kernel and solver of a module, with the arguments that you give for it.

  ```python
  import types
  import callgate as cg, jax.numpy as jnp, numpy as np

  ranks = types.SimpleNamespace(
    sort=cg.gate(np.sort, like=lambda x: jnp.sort(x), name="verify_all.sort"),
    count=cg.gate(np.size, out=jnp.int32(0), name="verify_all.count"),
  )
  reports = cg.verify_all(ranks, sort=(jnp.array([3.0, 1.0, 2.0]),))
  assert reports["sort"].ok
  assert reports["count"].results[0].skipped.startswith("no arguments given")
  ```

  Args:
    module: a module, or any object with gates and kernels as attributes. Attributes whose names
      begin with "_" are verified only if you give arguments for them.
    seconds: the time limit for each gate or kernel; see `Gate.verify`. It may be a keyword, too,
      if the module has no gate of this name.
    **arguments: for each name, a tuple of a call's positional arguments, as `sort=(x,)`.

  Returns:
    A dict of `VerifyReport`s, sorted by name. Without arguments all questions of a gate are
    skipped.

  Raises:
    GateDefinitionError: a name is no gate or kernel of the module, or its arguments are not a
      tuple.
  """
  found = {
    name: value
    for name in sorted(dir(module))
    if isinstance(value := inspect.getattr_static(module, name, None), ArrayFunction)
    and (name in arguments or not name.startswith("_"))
  }
  if "seconds" not in found:
    seconds = arguments.pop("seconds", seconds)
  for name, given in arguments.items():
    if name not in found:
      what = f"expected names of gates and kernels of {_name_of(module)}, got '{name}'"
      raise GateDefinitionError(f"verify_all: {what}{spellings.near(name, found)}")
    if not isinstance(given, tuple):
      options.refuse("verify_all", name, f"a tuple of arguments, such as {name}=(x,)", given)
  return {
    name: verify(function, arguments[name], {}, seconds)
    if name in arguments
    else _skipped(core(function).label, f"no arguments given: verify_all(module, {name}=(x,))")
    for name, function in found.items()
  }


def _name_of(module: Any) -> str:
  return getattr(module, "__name__", None) or f"a {type(module).__name__}"


@_part.joins("verifications")
class Verifications(Part):
  """Ends the processes of questions that still run at the end of the process."""

  def end(self, phase: Phase, wait: Wait) -> None:
    del wait
    if phase == "leave":
      travel.end_processes()
