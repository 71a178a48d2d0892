# SPDX-License-Identifier: Apache-2.0
"""`callgate.print`: `jax.debug.print` that does not make the program wait."""

from __future__ import annotations

import string
import sys
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from callgate._core import dtypes, errors, failures, options
from callgate._core.encoding import is_open
from callgate._jax import refs
from callgate._tap import tap, target
from callgate._tap.site import TapSite

_ARRAYS = (jax.Array, np.ndarray, np.generic, bool, int, float, complex)


def print(
  fmt: str,
  /,
  *args: Any,
  ordered: bool = False,
  partitioned: bool = False,
  skip_format_check: bool = False,
  **kwargs: Any,
) -> None:
  """Prints values from (compiled) code, on callgate's thread.

  ```python
  import callgate as cg, jax

  jax.jit(lambda x: cg.print("x = {}, twice {y:.1f}", x, y=2 * x))(1.5)
  cg.barrier()                       # x = 1.5, twice 3.0
  ```

  Args:
    fmt: text with fields, as `str.format`; without any, and with `skip_format_check`, the values
      follow it.
    *args: values: pytrees of arrays, or anything else that can be formatted.
    ordered: keeps program order with other ordered prints, taps and gates of the device.
    partitioned: as of `jax.debug.print`. So far a program that XLA partitions prints the whole
      value in both cases.
    skip_format_check: do not check while tracing that every value has its field.
    **kwargs: values by name.

  NumPy's print options are those that hold while tracing. Under vmap each lane prints.
  """
  failures.raise_deferred()
  options.text("print", "fmt", fmt, "text")
  args, kwargs = refs.read((args, kwargs))
  flags = {"ordered": ordered, "partitioned": partitioned, "skip_format_check": skip_format_check}
  options.booleans("print", **flags)
  has_fields = any(field is not None for _, field, _, _ in string.Formatter().parse(fmt))
  if not skip_format_check:
    options.template("print", "fmt", fmt)
    _Checker().vformat(fmt, args, kwargs)
  if kwargs and not has_fields:  # with skip_format_check
    by = f"values by name ({sorted(kwargs)})"
    raise errors.GateDefinitionError(f"print: {by} need fields in fmt, got {fmt!r}")
  leaves, tree = jax.tree.flatten((args, kwargs))
  static = {
    i: leaf for i, leaf in enumerate(leaves) if not isinstance(leaf, _ARRAYS) and not is_open(leaf)
  }
  arrays = [jax.numpy.asarray(leaf) for i, leaf in enumerate(leaves) if i not in static]
  carried = [dtypes.carried(array) for array in arrays]
  print_options = np.get_printoptions()

  def write(arrays: Sequence[Any]) -> None:
    rest = iter(arrays)
    filled = [static[i] if i in static else next(rest) for i in range(tree.num_leaves)]
    args, kwargs = jax.tree.unflatten(tree, filled)
    args = [_shown(value, fmt) for value in args]
    kwargs = {name: _shown(value, fmt) for name, value in kwargs.items()}
    with np.printoptions(**print_options):
      text = fmt.format(*args, **kwargs) if has_fields else " ".join((fmt, *map(str, args)))
    sys.stdout.write(text + "\n")

  write.__name__ = write.__qualname__ = "print"
  dtype_names = tuple(name for _, name in carried)
  several, effect = jax.tree.structure([0] * len(carried)), "ordered" if ordered else "io"
  site = TapSite(tree=several, name="print", effect=effect, dtypes=dtype_names)
  tap.bind(target.of_function(write), site, [x for x, _ in carried])


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
  """Arrays whose dtype shows, in containers or by `!r`, are jax.Arrays, as in jax.debug.print."""
  if isinstance(value, (np.ndarray, np.generic)) and "!r" not in fmt:
    return value
  as_jax = jax.numpy.asarray
  return jax.tree.map(lambda x: as_jax(x) if isinstance(x, np.ndarray) else x, value)
