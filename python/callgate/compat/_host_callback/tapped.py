"""What both forms of `host_callback` share: from a pytree to a tap of callgate's, and back.

A tap is keyed by what it calls and by the pytree's structure, so that equal calls share one and
JAX's caches hit. Its records go through a channel of their own, `CHANNEL`, and are unpacked on that
channel's thread, under the GIL.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
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
from callgate._tap.tap import uncarried
from callgate._tap.target import Tap

CHANNEL = "host_callback"


@dataclasses.dataclass(frozen=True)
class Tapped:
  """One record as the consumers of both forms see it, with arrays of the consumer's own."""

  value: Any
  transforms: tuple[tuple[str, dict[str, Any]], ...]  # (name, parameters), as they were applied


class Arrays:
  """A pytree as a tap takes it: leaves that can travel, and what is needed to put it together.

  With `copied`, outside of compiled code NumPy arrays become jax.Arrays by a copy on the host;
  `jnp.asarray` compiles a program for each of their types.
  """

  def __init__(self, api: str, value: Any, *, copied: bool = False) -> None:
    leaves, self.tree = jax.tree.flatten(value)
    self.arrays = [_as_array(api, leaf, index, copied) for index, leaf in enumerate(leaves)]
    carried = [dtypes.carried(array) for array in self.arrays]
    self.operands = [array for array, _ in carried]
    self.dtypes = tuple(name for _, name in carried)

  def site(self, name: str, **options: Any) -> TapSite:
    """The site of a tap of it; the consumer puts the pytree together, so here it is flat."""
    flat = jax.tree.structure((0,) * len(self.operands))
    return TapSite(tree=flat, name=name, dtypes=self.dtypes, whole=True, **options)

  def rebuild(self, results: Sequence[Any]) -> Any:
    """The pytree of a tap's results, in the dtypes that the user gave."""
    return jax.tree.unflatten(self.tree, map(uncarried, self.arrays, results))


def tap_of(
  key: tuple[Any, ...],
  tree: Any,
  consume: Callable[[Tapped, int | None], None],
  function: Callable[..., Any],
  *,
  eager: bool = False,
) -> Tap:
  """The tap to `consume`; the same for equal keys and structures.

  `consume` is called for each record with it and the device's global id (-1: not known), on the
  channel's thread; there it must not raise. With `eager`, where nothing is compiled, it is called
  in the caller's thread, with None for the device, and may raise. `function` is the user's own, for
  the tap's name.
  """
  check_not_forked()

  def unpack(text: str, arrays: Sequence[np.ndarray]) -> Tapped:
    about = delivery.description(text)
    value = jax.tree.unflatten(tree, about.value(arrays))
    return Tapped(value, _transforms(about, arrays))

  def rows(source: Any, rows: Sequence[Any]) -> None:
    for row in rows:
      consume(unpack(source[3], row[6]), row[3])

  def at_once(text: str, arrays: Sequence[Any]) -> None:
    consume(unpack(text, [np.array(array) for array in arrays]), None)

  return target.of_rows(
    (*key, tree), rows, name_of(function), channel=CHANNEL, eager=at_once if eager else None
  )


def name_of(function: Callable[..., Any]) -> str:
  """A callable's name, for messages and records: one line."""
  function = getattr(function, "func", function)  # functools.partial
  name = getattr(function, "__qualname__", None) or type(function).__qualname__
  return str(name).replace("\n", " ") or "tap"


def exact(value: Any) -> tuple[Any, ...]:
  """A key that tells equal values apart which are not the same: 1, 1.0 and True; 0.0 and -0.0."""
  if isinstance(value, (tuple, frozenset, int, float, complex, np.generic)):
    return type(value), value, repr(value)  # pyright: ignore[reportUnknownVariableType]
  return type(value), value


def _transforms(
  about: delivery.Description, arrays: Sequence[np.ndarray]
) -> tuple[tuple[str, dict[str, Any]], ...]:
  def parameters(name: str, how: dict[str, Any]) -> dict[str, Any]:
    if name == "mask":
      return {"logical_shapes": _logical_shapes(about, arrays)}
    return {key: _as_tuple(value) for key, value in how.items()}

  return tuple((name, parameters(name, how)) for name, how in about.transforms)


def _as_tuple(value: Any) -> Any:
  return tuple(_as_tuple(one) for one in value) if isinstance(value, list) else value  # pyright: ignore[reportUnknownVariableType]


def _logical_shapes(about: delivery.Description, arrays: Sequence[np.ndarray]) -> tuple[Any, ...]:
  """For each leaf its logical shape; sizes that differ from lane to lane are arrays."""
  shapes: list[Any] = [array.shape for array in arrays[: about.values]]
  for index, sizes in zip(about.logical, arrays[about.values :], strict=True):
    shapes[index] = tuple(
      int(sizes[axis]) if sizes.ndim == 1 else sizes[..., axis] for axis in range(sizes.shape[-1])
    )
  return tuple(shapes)


def _as_array(api: str, leaf: Any, index: int, copied: bool) -> Any:
  if isinstance(leaf, jax.Array):
    return leaf
  try:
    if copied and type(leaf) is np.ndarray and tracing.in_no_trace():
      return jax.device_put(leaf.copy())  # the array may change, what is put may be shared
    return jnp.asarray(leaf)
  except (TypeError, ValueError) as error:
    raise TypeError(f"{api}: leaf {index}: expected an array, got {shown(leaf)}") from error
