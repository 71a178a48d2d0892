# SPDX-License-Identifier: Apache-2.0
"""Sends functions, values and exceptions between processes.

cloudpickle sends functions: those of modules by name; lambdas, those of `__main__` and the values
that they close over by value. Functions of modules that the other process can't import are sent by
value, too.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import inspect
import io
import itertools
import pickle
import sys
from collections.abc import Callable, Generator, Iterator
from types import CodeType, ModuleType
from typing import Any

from callgate._core import extras, foreign
from callgate._core.errors import GateDefinitionError, WorkerError


def dumps(label: str, value: Any) -> bytes:
  """Pickles a value; `label` names it in messages.

  Raises:
    GateDefinitionError: it can't be pickled; the message names the part that can't.
  """
  cloudpickle = extras.library("cloudpickle", "cloudpickle", "workers", by=label)
  try:
    with _by_value(cloudpickle, value):
      return _dump(cloudpickle, value)
  except Exception as error:
    part = _part(cloudpickle, value)
    what = f"its {part} " if part else "it "
    why = foreign.text_of(error)
    raise GateDefinitionError(
      f"{label} can't go to another process: {what}can't be pickled: {why}. Use a function whose "
      "closure, defaults and globals can be pickled, and create other objects in a class's "
      "__init__ or by initializer="
    ) from error


def _dump(cloudpickle: ModuleType, value: Any) -> bytes:
  written = io.BytesIO()
  _pickler(cloudpickle)(written).dump(value)
  return written.getvalue()


@functools.cache  # at most one entry
def _pickler(cloudpickle: ModuleType) -> Any:
  """Returns cloudpickle's pickler; code keeps its file's name, for tracebacks; open files raise."""
  table = cloudpickle.Pickler.dispatch_table
  reduce = table[CodeType]

  def with_file(code: CodeType) -> Any:
    made, parts = reduce(code)
    return made, tuple(code.co_filename if one == "<dynamic-code>" else one for one in parts)

  def no_file(file: io.TextIOWrapper) -> Any:  # cloudpickle would copy the file's text
    if file in (sys.stdout, sys.stderr):
      return table[io.TextIOWrapper](file)
    raise TypeError(f"cannot pickle the open file {file.name!r}")

  own = {CodeType: with_file, io.TextIOWrapper: no_file}
  kept = {"dispatch_table": collections.ChainMap(own, table)}
  return type("_Pickler", (cloudpickle.Pickler,), kept)


@contextlib.contextmanager
def _by_value(cloudpickle: ModuleType, value: Any) -> Generator[None]:
  """Pickles by value the module that defines a function, if other processes can't import it."""
  names = {_module_of(one) for one in _functions_in(value)}
  taken = [sys.modules[name] for name in names if name in sys.modules and not _importable(name)]
  already = cloudpickle.list_registry_pickle_by_value()
  taken = [module for module in taken if module.__name__ not in already]
  for module in taken:
    cloudpickle.register_pickle_by_value(module)
  try:
    yield
  finally:
    for module in taken:
      cloudpickle.unregister_pickle_by_value(module)


def _functions_in(value: Any) -> Iterator[Any]:
  if isinstance(value, dict):
    for one in value.values():
      yield from _functions_in(one)
  function: Any = value
  while inspect.ismethod(function) or hasattr(function, "func"):
    function = function.__func__ if inspect.ismethod(function) else function.func
  yield getattr(function, "make", function)


def _module_of(function: Any) -> str:
  name = getattr(function, "__module__", None) or type(function).__module__
  return name if isinstance(name, str) else "__main__"


def _importable(name: str) -> bool:
  """True if the import system finds a module by its name; a test runner may have replaced it."""
  if name == "__main__":  # cloudpickle handles this one
    return True
  path: Any = None
  for head in itertools.accumulate(name.split("."), "{}.{}".format):
    finders = [f for f in sys.meta_path if not _module_of(f).startswith("_pytest")]
    specs = (f.find_spec(head, path) for f in finders if hasattr(f, "find_spec"))
    spec = next((one for one in specs if one is not None), None)
    if spec is None:
      return False
    path = spec.submodule_search_locations
  return True


def _part(cloudpickle: ModuleType, value: Any) -> str:
  """Names the part of a function that can't be pickled: "closure variable 'lock' (a lock)".

  It is "" if no part is to blame.
  """
  for function in _functions_in(value):
    code = getattr(function, "__code__", None)
    if code is None:
      continue
    closure = zip(code.co_freevars, getattr(function, "__closure__", None) or (), strict=False)
    parts = [("closure variable", name, cell) for name, cell in closure]
    held = function.__globals__
    parts += [("global", name, held[name]) for name in code.co_names if name in held]
    for kind, name, part in parts:
      inner: Any = part
      try:
        inner = part.cell_contents if kind == "closure variable" else part
        _dump(cloudpickle, inner)
      except Exception:  # noqa: BLE001 - any exception shows that this is the part
        return f"{kind} '{name}' (a {type(inner).__name__})"
  return ""


# -- exceptions ------------------------------------------------------------------------------------
class WorkerTraceback(Exception):
  """The cause of an exception of another process: its traceback there, as text."""

  def __init__(self, text: str) -> None:
    super().__init__(text)
    self.text = text

  def __str__(self) -> str:
    return f'\n"""\n{self.text}\n"""'


_OURS = "callgate: raised in gate"


def pack(error: BaseException) -> bytes:
  """Returns an exception as bytes that any process can read."""
  text = foreign.traceback_of(error)
  if foreign.notes_of(error):  # the caller describes the place better
    text = "\n".join(line for line in text.split("\n") if not line.startswith(_OURS))
    foreign.keep_notes(error, lambda note: not note.startswith(_OURS))
  made = _packed(error)
  # Python's way needs attributes that can be set, which a frozen dataclass refuses. A class with
  # its own `__reduce__` may have a reason for it.
  if made is None and type(error).__reduce__ is BaseException.__reduce__:
    made = _packed(_ErrorParts(foreign.parts_of(error)))
  return pickle.dumps((made, foreign.name_of(error), text))


class _ErrorParts:
  """Replaces an exception in a pickle by the parts that make it."""

  def __init__(self, parts: tuple[type[BaseException], tuple[Any, ...], dict[str, Any]]) -> None:
    self._parts = parts

  def __reduce__(self) -> Any:
    return foreign.made_of, self._parts


def _packed(error: object) -> bytes | None:
  try:
    made = _with_pickler(error)
    return made if foreign.is_a(pickle.loads(made), BaseException) else None
  except Exception:  # noqa: BLE001 - an exception's own pickling may raise anything
    return None


def _with_pickler(error: object) -> bytes:
  dump: Callable[[Any], bytes] = pickle.dumps
  with contextlib.suppress(ImportError):
    import cloudpickle  # pyright: ignore[reportMissingTypeStubs]

    dump = cloudpickle.dumps
  return dump(error)


def unpack(label: str, packed: bytes) -> BaseException:
  """Returns the exception, with its traceback as the cause; a WorkerError if unpickling fails."""
  made, kind, text = pickle.loads(packed)
  error: Any = None
  if made is not None:
    with contextlib.suppress(Exception):  # a class that doesn't exist here
      error = pickle.loads(made)
  if not foreign.is_a(error, BaseException):
    last = text.rsplit("\n", 1)[-1]
    error = WorkerError(f"{label}: raised {kind}, which can't be pickled: {last}")
  foreign.set_cause(error, WorkerTraceback(text))
  return error
