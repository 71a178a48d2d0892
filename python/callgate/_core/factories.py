# SPDX-License-Identifier: Apache-2.0
"""Public functions whose keyword options are declared by a frozen dataclass.

Such a function is written as `f(what, /, *, options: SomeOptions)`, and called with the fields of
`SomeOptions` as keywords. The dataclass gives the signature for `inspect` and editors, the errors
for unknown names, and the options' part of the docstring: from its fields, and from the
"Attributes:" of its docstring and its bases'.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from callgate._core import registry, shown, spellings
from callgate._core.pickling import Origin, made_by
from callgate._core.where import where

P = ParamSpec("P")
Owner = TypeVar("Owner")
What = TypeVar("What", contravariant=True)
Made = TypeVar("Made", covariant=True)


class OfTwo(Protocol[What, P, Made]):
  """Takes a source and, if it has several functions, the name of one."""

  def __call__(
    self, what: What, name: str | None = None, /, *args: P.args, **options: P.kwargs
  ) -> Made: ...


class OfCode(Protocol[P, Made]):
  """Takes parameters and code."""

  def __call__(
    self, in_params: str, out_params: str, operation: str, name: str | None = None, /,
    *args: P.args, **options: P.kwargs,
  ) -> Made: ...  # fmt: skip


def decorator(declared: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
  """Makes a function of a callable, which returns a decorator without the callable."""
  return functools.partial(_taking, declared, decorates=True)


def of_one(
  declared: Callable[P, Any],
) -> Callable[[Callable[Concatenate[What, ...], Made]], Callable[Concatenate[What, P], Made]]:
  return functools.partial(_taking, declared)


def of_two(
  declared: Callable[P, Any],
) -> Callable[[Callable[Concatenate[What, ...], Made]], OfTwo[What, P, Made]]:
  return functools.partial(_taking, declared)


def of_code(declared: Callable[P, Any]) -> Callable[[Callable[..., Made]], OfCode[P, Made]]:
  return functools.partial(_taking, declared)


def method(
  declared: Callable[P, Any],
) -> Callable[
  [Callable[Concatenate[Owner, What, ...], Made]], Callable[Concatenate[Owner, What, P], Made]
]:
  return functools.partial(_taking, declared)


def with_constants(
  declared: Callable[..., Any],
) -> Callable[[Callable[..., Made]], Callable[..., Made]]:
  """Makes a function that also accepts any other keyword."""
  return functools.partial(_taking, declared)


def _taking(declared: Any, written: Callable[..., Any], *, decorates: bool = False) -> Any:
  own = [p for p in inspect.signature(written).parameters.values() if p.name != "options"]
  fields = dict(inspect.signature(declared).parameters)
  for parameter in own:  # parameters that are also positional
    fields.pop(parameter.name, None)
  if decorates:
    own[0] = own[0].replace(default=None, annotation=f"{own[0].annotation} | None")
  last = [own.pop()] if own[-1].kind is inspect.Parameter.VAR_KEYWORD else []
  required_first = sorted(fields.values(), key=lambda p: p.default is not p.empty)
  signature = inspect.Signature([*own, *required_first, *last])

  @functools.wraps(written)
  def take(*args: Any, **given: Any) -> Any:
    try:
      signature.bind(*args, **given)
    except TypeError as error:
      spellings.answer(written.__name__, given, fields)
      unknown = [name for name in given if f"keyword argument '{name}'" in str(error)]
      hint = spellings.near(unknown[0], signature.parameters) if unknown else ""
      raise TypeError(f"{written.__name__}() {error}{hint}") from None
    here = where()
    kept = dict(given)
    options = declared(**{name: given.pop(name) for name in fields if name in given})

    def made_of(*args: Any) -> Any:
      with registry.defining(here.definition()):
        made = written(*args, **given, options=options)
      return made_by(Origin(here.module, take, args, kept), made)

    return made_of if decorates and (not args or args[0] is None) else made_of(*args)

  returned = written.__annotations__["return"]
  take.__signature__ = shown.signature(  # type: ignore[attr-defined]
    signature.replace(return_annotation=returned)
  )
  take.__annotations__ = {
    **{name: p.annotation for name, p in signature.parameters.items()},
    "return": returned,
  }
  take.__doc__ = _documented(written.__doc__, declared, list(fields))
  return take


# An entry of a docstring's section: "  name: description", and its further, deeper lines.
_ENTRY = re.compile(r"^  (\w+): .*(?:\n    .*)*", re.MULTILINE)


def _documented(text: str | None, declared: type, options: list[str]) -> str | None:
  """Returns a function's docstring with the missing options added at the end of its "Args:"."""
  if text is None:  # python -OO
    return None
  head, _, rest = inspect.cleandoc(text).partition("\nArgs:\n")
  own, _, tail = rest.partition("\n\n")
  known = {match[1] for match in _ENTRY.finditer(own)}
  entries: dict[str, str] = {}
  for base in reversed(declared.__mro__):
    _, _, attributes = inspect.cleandoc(base.__doc__ or "").partition("\nAttributes:\n")
    entries |= {match[1]: match[0] for match in _ENTRY.finditer(attributes)}
  more = [entries[name] for name in options if name not in known]
  return "\n".join([f"{head}\nArgs:", own, *more, "", tail])
