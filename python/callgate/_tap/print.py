"""`callgate.print`: `jax.debug.print` that does not make the program wait."""

from __future__ import annotations

import dataclasses
import string
import sys
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from callgate._core import dtypes, options
from callgate._core.errors import GateDefinitionError
from callgate._core.failures import raise_deferred
from callgate._tap import target
from callgate._tap.site import TapSite
from callgate._tap.tap import bind


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
  raise_deferred()
  options.text("print", "fmt", fmt, "text")
  options.booleans(
    "print", ordered=ordered, partitioned=partitioned, skip_format_check=skip_format_check
  )
  has_fields = any(field is not None for _, field, _, _ in string.Formatter().parse(fmt))
  if not skip_format_check:
    _Checker().vformat(fmt, args, kwargs)
  if kwargs and not has_fields:  # with skip_format_check
    raise GateDefinitionError(
      f"print: values by name ({sorted(kwargs)}) need fields in fmt, got {fmt!r}"
    )
  leaves, tree = jax.tree.flatten((args, kwargs))
  dynamic = [leaf for leaf in leaves if _is_array(leaf)]
  static = {i: leaf for i, leaf in enumerate(leaves) if not _is_array(leaf)}
  printer = _Printer(fmt, has_fields, tree, static)
  carried = [dtypes.carried(jax.numpy.asarray(leaf)) for leaf in dynamic]
  site = TapSite(
    tree=jax.tree.structure([0] * len(carried)),
    name="print",
    effect="ordered" if ordered else "io",
    dtypes=tuple(name for _, name in carried),
  )
  bind(target.of_function(printer), site, [x for x, _ in carried])


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


def _is_array(leaf: Any) -> bool:
  return isinstance(leaf, (jax.Array, np.ndarray, np.generic, bool, int, float, complex))


@dataclasses.dataclass(eq=False)
class _Printer:
  """The consumer of one print: puts static values back in their places, formats, writes."""

  fmt: str
  has_fields: bool
  tree: Any
  static: dict[int, Any]
  options: Any = dataclasses.field(default_factory=np.get_printoptions)

  __name__ = "print"

  def __call__(self, arrays: Sequence[Any]) -> None:
    values = iter(arrays)
    places = range(self.tree.num_leaves)
    leaves = [self.static[i] if i in self.static else next(values) for i in places]
    args, kwargs = jax.tree.unflatten(self.tree, leaves)
    args = [self._shown(value) for value in args]
    kwargs = {name: self._shown(value) for name, value in kwargs.items()}
    with np.printoptions(**self.options):
      if self.has_fields:
        text = self.fmt.format(*args, **kwargs)
      else:
        text = " ".join((self.fmt, *map(str, args)))
    sys.stdout.write(text + "\n")

  def _shown(self, value: Any) -> Any:
    """Arrays whose dtype shows, in containers or by `!r`, are jax.Arrays, as in jax.debug.print."""
    bare = isinstance(value, (np.ndarray, np.generic))
    if (bare and "!r" not in self.fmt) or not jax.tree.leaves(value):
      return value
    return jax.tree.map(
      lambda leaf: jax.numpy.asarray(leaf) if isinstance(leaf, np.ndarray) else leaf, value
    )
