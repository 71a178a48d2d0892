"""What both forms of `host_callback` share: from a pytree to a tap of callgate's, and back.

Equal calls share a tap, so that JAX's caches hit. Records go through a channel of their own,
`CHANNEL`, and are unpacked on that channel's thread, under the GIL.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from callgate._core import dtypes
from callgate._core.masked import shown
from callgate._jax import tracing
from callgate._tap import delivery, target
from callgate._tap.consumers import check_not_forked
from callgate._tap.site import TapSite
from callgate._tap.tap import bind, uncarried

CHANNEL = "host_callback"
# (name, parameters) of each transformation that a tap met, as they were applied.
Transforms = tuple[tuple[str, dict[str, Any]], ...]


class Arrays:
  """A pytree as a tap takes it: leaves that can travel, and what is needed to put it together."""

  def __init__(self, api: str, value: Any, *, copied: bool = False) -> None:
    leaves, self.tree = jax.tree.flatten(value)
    self.arrays = [_as_array(api, leaf, index, copied) for index, leaf in enumerate(leaves)]
    carried = [dtypes.carried(array) for array in self.arrays]
    self.operands = [array for array, _ in carried]
    self.dtypes = tuple(name for _, name in carried)

  def rebuild(self, results: Sequence[Any]) -> Any:
    """The pytree of a tap's results, in the dtypes that the user gave."""
    return jax.tree.unflatten(self.tree, map(uncarried, self.arrays, results))


def bind_tap(
  function: Callable[..., Any], key: tuple[Any, ...], given: Arrays,
  consume: Callable[[Any, Transforms, int | None], None], *, extra: Sequence[Any] = (),
  masked: bool = False, eager: bool = False, **options: Any,
) -> Sequence[Any]:  # fmt: skip
  """The results of a tap of `given` to `consume`, which is shared by equal keys and structures.

  `consume` is called for each record with its value (arrays of its own), its transformations and
  the device's global id (-1: not known), on the channel's thread; there it must not raise. With
  `eager`, where nothing is compiled, in the caller's thread, with None for the device. `function`
  is the user's own; `options` are the site's.
  """
  check_not_forked()
  tree = given.tree

  def unpack(text: str, arrays: Sequence[np.ndarray], device: int | None) -> None:
    about = delivery.description(text)
    value = jax.tree.unflatten(tree, about.value(arrays))
    transforms = (
      (met, {"logical_shapes": _logical_shapes(about, arrays)} if met == "mask" else _as_tuple(how))
      for met, how in about.transforms
    )
    consume(value, tuple(transforms), device)

  def rows(source: Any, rows: Sequence[Any]) -> None:
    for row in rows:
      unpack(source[3], row[6], row[3])

  def at_once(text: str, arrays: Sequence[Any]) -> None:
    unpack(text, [np.array(array) for array in arrays], None)

  name, flat = name_of(function), jax.tree.structure((0,) * len(given.operands))
  site = TapSite(tree=flat, name=name, dtypes=given.dtypes, whole=True, **options)
  now = at_once if eager else None
  tap = target.of_rows((*key, tree), rows, name, channel=CHANNEL, eager=now)
  return bind(tap, site, given.operands, extra, (("mask", ()),) if masked else ())


def name_of(function: Callable[..., Any]) -> str:
  """A callable's name, for messages and records: one line."""
  function = getattr(function, "func", function)  # functools.partial
  name = getattr(function, "__qualname__", None) or type(function).__qualname__
  return str(name).replace("\n", " ") or "tap"


def exact_items(kwargs: dict[str, Any]) -> tuple[Any, ...]:
  """A key that tells equal values apart which are not the same: 1, 1.0 and True; 0.0 and -0.0."""
  plain = (tuple, frozenset, int, float, complex, np.generic)
  return tuple(
    (name, type(value), value, repr(value) if isinstance(value, plain) else "")
    for name, value in sorted(kwargs.items())
  )


def _as_tuple(value: Any) -> Any:
  if isinstance(value, dict):
    return {key: _as_tuple(one) for key, one in value.items()}  # pyright: ignore[reportUnknownVariableType]
  return tuple(map(_as_tuple, value)) if isinstance(value, list) else value  # pyright: ignore[reportUnknownVariableType]


def _logical_shapes(about: delivery.Description, arrays: Sequence[np.ndarray]) -> tuple[Any, ...]:
  """For each leaf its logical shape; sizes that differ from lane to lane are arrays."""
  shapes: list[Any] = [array.shape for array in arrays[: about.values]]
  for index, sizes in zip(about.logical, arrays[about.values :], strict=True):
    of_axes = np.moveaxis(sizes, -1, 0)
    shapes[index] = tuple(map(int, of_axes) if sizes.ndim == 1 else of_axes)
  return tuple(shapes)


def _as_array(api: str, leaf: Any, index: int, copied: bool) -> Any:
  if isinstance(leaf, jax.Array):
    return leaf
  try:
    if copied and type(leaf) is np.ndarray and tracing.in_no_trace():  # else a compilation
      return jax.device_put(leaf.copy())  # the array may change, what is put may be shared
    return jnp.asarray(leaf)
  except (TypeError, ValueError) as error:
    raise TypeError(f"{api}: leaf {index}: expected an array, got {shown(leaf)}") from error


# -- what id_print prints ------------------------------------------------------------------------
def write(output_stream: Any, entries: Mapping[str, Any], body: str) -> None:
  """Writes a line of sorted `key: value`, if there are entries, then the body."""
  first = " ".join(f"{key}: {value}" for key, value in sorted(entries.items()))
  text = f"{first}\n{body}\n" if first else f"{body}\n"
  if output_stream is None:
    print(text, end="", flush=True)
  else:
    output_stream.write(text)


def text_of(value: Any, threshold: int, width: int = 0, column: int = 0) -> str:
  """2020's form, an element a line; with a width 2023's, on one line from `column` if it fits."""
  if isinstance(value, (tuple, list)):
    start, end = ("( ", " )") if width and isinstance(value, tuple) else ("[ ", " ]")
    items: list[tuple[str, Any]] = [("", one) for one in value]  # pyright: ignore[reportUnknownVariableType]
  elif isinstance(value, dict):
    start, end = "{ ", " }"
    items = [(f"{key}=", one) for key, one in sorted(value.items())]  # pyright: ignore
  elif isinstance(value, np.ndarray):
    return np.array2string(value, threshold=threshold)
  else:
    return str(value)
  inner = column + len(start)
  parts = [_hang(label, text_of(one, threshold, width, inner + len(label))) for label, one in items]
  line = start + " ".join(parts) + end
  if "\n" in line or column + len(line) > width:
    return _hang(start, "\n".join(parts)) + end
  return line


def _hang(label: str, text: str) -> str:
  """`text` after `label`, its further lines under its first."""
  return label + text.replace("\n", "\n" + " " * len(label))
