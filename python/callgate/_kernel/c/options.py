"""The options of `callgate.cfunc`."""

# Annotations are evaluated here, for `typing.get_type_hints` of the functions that take these.

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

from callgate._call.options import Vmap
from callgate._kernel.options import KernelOptions

Order = Literal["C", "F"]
Errors = str | Mapping[int | str, str]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class COptions(KernelOptions):
  """The options of `callgate.cfunc`.

  Attributes:
    signature: the function's declaration in C, where it doesn't know its own or that one is wrong.
    args: what C's arguments are, see above. Left out for functions of single numbers.
    loop: the function takes single numbers, and is called for each element of the arguments, which
      are broadcast as NumPy does. Default: True for functions that take numbers by value and return
      one, without `args`.
    order: "F" for column-major arrays in C (as Fortran's libraries have them), for all or by name;
      they are transposed on the way in and out.
    cast: arguments that C takes by value may have another dtype of the same or a lesser kind, and
      convert as in C. A loop's results then are no wider than its arguments.
    errors: the message for a non-zero `info` or `status`, or messages by number, with ">0" and "<0"
      for all others. `{info}` in it becomes the number.
    pointers: addresses that C gets by name: integers, objects of ctypes or cffi, capsules. They
      live as long as the kernel.
    vmap: "each", "whole", "broadcast" or a rule, as for `callgate.gate`. Default: "each"; all lanes
      in one call for a loop.
    thread_safe: the function may run on several threads at once: for calls on several devices and
      in several programs, for lanes and for elements. By default calls take turns, with those of
      all other kernels of the same shared library that are not thread-safe.
  """

  signature: str | None = None
  args: str | None = None
  vmap: Vmap | Callable[..., Any] | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
  loop: bool | None = None
  order: Order | Mapping[str, Order] = "C"
  cast: bool = False
  errors: Errors | None = None
  pointers: Mapping[str, Any] | None = None
