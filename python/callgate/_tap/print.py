# SPDX-License-Identifier: Apache-2.0
"""`callgate.print`: `jax.debug.print` without a wait in the program."""

from __future__ import annotations

import itertools
import re
import string
import sys
from typing import Any

import jax
import numpy as np

from callgate._core import dtypes, errors, failures, options, split
from callgate._core.encoding import is_open
from callgate._jax import refs
from callgate._part import Part, joins
from callgate._tap import tap, target
from callgate._tap.site import TapSite

_ARRAYS = (jax.Array, np.ndarray, np.generic, bool, int, float, complex)


def print(
  fmt: str,
  /,
  *args: Any,
  name: str = "print",
  ordered: bool = False,
  partitioned: bool = False,
  skip_format_check: bool = False,
  **kwargs: Any,
) -> None:
  """Prints values from a compiled program, on callgate's thread; the program doesn't wait.

  ```python
  import callgate as cg, jax

  jax.jit(lambda x: cg.print("x = {}, twice {y:.1f}", x, y=2 * x))(1.5)
  cg.barrier()                       # x = 1.5, twice 3.0
  ```

  Values are formatted with NumPy's print options at the time of tracing. Under `jax.vmap` each lane
  prints a line.

  Args:
    fmt: a format string, as for `str.format`. With `skip_format_check`, the values follow a string
      that has no fields.
    *args: values: pytrees of arrays, or any other objects that can be formatted.
    name: the name of the print in `explain`, the timeline and messages. To fill a field {name},
      pass the value by position.
    ordered: keeps the program order of all ordered prints, taps and gates on a device.
    partitioned: accepted as by `jax.debug.print`; a program over several devices prints the whole
      value in both cases.
    skip_format_check: skips the check, while tracing, that every value has a field.
    **kwargs: values by name.
  """
  failures.raise_deferred()
  options.text("print", "fmt", fmt, "text")
  given: Any = name
  if not isinstance(given, str):
    expected = "the print's name, a line of text; pass the value of a field {name} by position"
    options.refuse("print", "name", expected, name)
  name = options.name("print", name) or "print"
  fmt = _by_position(fmt)
  args, kwargs = refs.read((args, kwargs))
  flags = {"ordered": ordered, "partitioned": partitioned, "skip_format_check": skip_format_check}
  options.booleans("print", **flags)
  has_fields = any(field is not None for _, field, _, _ in string.Formatter().parse(fmt))
  if not skip_format_check:
    options.template("print", "fmt", fmt)
    _Checker().vformat(fmt, args, kwargs)
  if kwargs and not has_fields:  # possible with skip_format_check
    by = f"values by name ({sorted(kwargs)})"
    raise errors.GateDefinitionError(f"print: {by} need fields in fmt, got {fmt!r}")
  # Programs hold the options, so that these go to other processes with them.
  shown = tuple(sorted(np.get_printoptions().items()))
  text = split.Static((fmt, has_fields, shown))
  leaves, tree = jax.tree.flatten(jax.tree.map(_split, (text, args, kwargs)))
  carried = [dtypes.carried(jax.numpy.asarray(leaf), keys=True) for leaf in leaves]
  site = TapSite(
    tree=tree, name=name, effect="ordered" if ordered else "io",
    dtypes=tuple(name for _, name in carried),
  )  # fmt: skip
  tap.bind(_tap(), site, [x for x, _ in carried])


def _by_position(fmt: str) -> str:
  """Returns the format with numbers for each {name} and for each field without a number."""
  parts = list(string.Formatter().parse(fmt))
  if not any(re.match(r"name\b", field or "") for _, field, _, _ in parts):
    return fmt
  text, numbers = "", itertools.count()
  for literal, field, spec, conversion in parts:
    text += literal.replace("{", "{{").replace("}", "}}")
    if field is not None:
      asked = (f"!{conversion}" if conversion else "") + (f":{spec}" if spec else "")
      place = re.match(r"(name)?(?=[.\[]|$)", field)
      place = f"{next(numbers)}{field[place.end() :]}" if place else field
      text += f"{{{place}{asked}}}"
  return text


def _split(leaf: Any) -> Any:
  return leaf if isinstance(leaf, _ARRAYS) or is_open(leaf) else split.Static(leaf)


def _write(value: Any) -> None:
  """Writes a line: the consumer of all prints."""
  (fmt, has_fields, options), args, kwargs = split.joined(value)
  args = [_shown(value, fmt) for value in args]
  kwargs = {name: _shown(value, fmt) for name, value in kwargs.items()}
  with np.printoptions(**dict(options)):
    text = fmt.format(*args, **kwargs) if has_fields else " ".join((fmt, *map(str, args)))
  sys.stdout.write(text + "\n")


_NAME = "tap:callgate.print"


# Locks itself: `_part.once`.
_tap = target.own(_NAME, "print", _write)


class _Checker(string.Formatter):
  """Finds values without a field, and fields without a value."""

  def format_field(self, value: Any, format_spec: str) -> str:
    return ""

  def convert_field(self, value: Any, conversion: Any) -> Any:
    return value

  def check_unused_args(self, used_args: Any, args: Any, kwargs: Any) -> None:
    unused = [str(i) for i in range(len(args)) if i not in used_args]
    unused += [name for name in kwargs if name not in used_args]
    if unused:
      raise ValueError(f"callgate.print: values without a field in fmt: {', '.join(unused)}")


def _shown(value: Any, fmt: str) -> Any:
  """Converts arrays in containers, or formatted by `!r`, to jax.Arrays, as jax.debug.print does."""
  if isinstance(value, (np.ndarray, np.generic)) and "!r" not in fmt:
    return value
  as_jax = jax.numpy.asarray
  return jax.tree.map(lambda x: as_jax(x) if isinstance(x, np.ndarray) else x, value)


@joins("prints")
class Prints(Part):
  """Defines the prints of programs of other processes."""

  def define(self, name: str) -> Any:
    return _tap() if name == _NAME else None
