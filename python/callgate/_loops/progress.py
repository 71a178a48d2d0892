# SPDX-License-Identifier: Apache-2.0
"""The options of a progress bar, and the marks that loops get for it.

A mark is bound into the loop's body (`_loops/primitive.py`) and has the bar's description as text.
Text can't hold a file, so the file has a name there (`_core/names.py`). The bar keeps the file
alive, and a program keeps its bars alive.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TextIO, TypeVar, get_args, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from callgate import _part
from callgate._core import exact, extras, names, per_function
from callgate._core import options as _options
from callgate._core.errors import GateDefinitionError
from callgate._core.options import option
from callgate._loops.primitive import MOST_LANES, UNKNOWN, Bar, progress_p
from callgate._runtime import config
from callgate._tap import delivery

_Body = TypeVar("_Body", bound=Callable[..., Any])


# The newest files of bars that take no weak reference, whose end can't be observed: a bar may be
# drawn after its program's end. Atomic: single steps.
_newest: collections.deque[exact.Exact] = collections.deque(maxlen=64)
# By name and lane (None for all lanes): time and value of the latest note. Atomic: single
# steps; never emptied: one number for each tap's name and lane.
noted: dict[tuple[str, int | None], tuple[float, Any]] = {}
Lanes = Literal["one", "bars"]
Style = Literal["tqdm", "rich"]
_MOST = 2**31 - 1
_HAS_BAR = "__callgate_has_bar__"
_nesting = threading.local()  # .depth: the bodies with bars that this thread is tracing


@dataclasses.dataclass(frozen=True)
class Progress:
  """The options of a loop's progress bar.

  Args:
    desc: the text before the bar.
    total: the number of steps. Default: the loop's own number, if it is known before the loop runs.
      With `at`, the value at the end: a number, which may be traced.
    at: a function of the loop's carry (for a decorated body, of its first argument) that returns
      the progress as a real number, such as the time of an ODE solver. The bar and the remaining
      time follow this value instead of the steps.
    lanes: under `jax.vmap`, "one" bar for all lanes, which follows the slowest lane; or "bars", one
      for each lane, at most 100.
    style: "tqdm", or "rich", which draws by the library Rich.
    every: the number of steps between two updates. Default: the steps of a few milliseconds.
    show: the names of tapped values to show behind the bar. Default: all that were tapped since the
      bar began.
    file: the file to write to. Default: `sys.stderr` at the time when the loop runs.
    position: the number of the line below the cursor. Default: the first free line.
    leave: keeps the bar on the screen after the loop. The bar of a nested loop is never kept.
    mininterval: the least seconds between two redraws.
  """

  desc: str | None = option(None, _options.text)
  total: Any = None
  every: int | None = option(None, _options.count, least=1, most=_MOST)
  show: Sequence[str] | None = option(None, _options.strings, what="a sequence of names")
  file: TextIO | None = option(None, _options.writable)
  position: int | None = option(None, _options.count, most=_MOST)
  leave: bool = option(True, _options.boolean)
  mininterval: float = option(0.1, _options.seconds, zero=True)
  at: Callable[[Any], Any] | None = option(None, _options.function)
  lanes: Lanes = option("one", _options.choice, allowed=get_args(Lanes))
  style: Style = option("tqdm", _options.choice, allowed=get_args(Style))

  def __post_init__(self) -> None:
    _options.check_fields("Progress", self)
    if self.at is not None:
      _check_goal(self.total)
    else:
      _options.or_none(_options.count, "Progress", "total", self.total, most=_MOST)
    if self.style == "rich":
      extras.library("rich", "rich", "rich", by="Progress: style='rich'")


def with_total(bar: Progress, steps: int) -> Progress:
  """Returns a bar's options with the total `steps`, unless they have a total or `at`."""
  return bar if bar.total is not None or bar.at else dataclasses.replace(bar, total=steps)


@dataclasses.dataclass(frozen=True)
class Automatic(Progress):
  """The bar of a loop without `progress=`, see `callgate.bars`.

  Args:
    least: the number of steps below which no bar is drawn.
  """

  least: int = 0


def _check_goal(total: Any) -> None:
  """Raises unless a bar by value may end at `total`."""
  if not isinstance(total, (jax.Array, np.ndarray)):
    _options.number("Progress", "total", total, what="the number at which `at` ends")
  elif jnp.shape(total) or not jnp.issubdtype(total.dtype, np.number):
    got = f"{total.dtype}{list(total.shape)}"
    raise GateDefinitionError(f"Progress: total: expected a number of shape (), got {got}")


def options_of(progress: object) -> Progress | None:
  """Returns the options for a loop's `progress=`; None for no bar."""
  if progress is None or progress is False:
    return None
  if isinstance(progress, Progress):
    return progress
  if progress is True or isinstance(progress, str):
    return Progress(desc=None if progress is True else progress)
  raise GateDefinitionError(
    f"progress: expected None, a bool, a description or callgate.Progress, got {progress!r}"
  )


def _text_of(options: Progress, file: str | None) -> str:
  """Returns the text of a bar in a program, at the present depth of nested loops."""
  plain = ("desc", "position", "leave", "mininterval", "style")
  text = {name: getattr(options, name) for name in plain}
  text |= {
    "show": None if options.show is None else list(options.show),
    "file": file,
    "depth": getattr(_nesting, "depth", 0),
    "least": options.least if isinstance(options, Automatic) else None,
  }
  return json.dumps({key: value for key, value in text.items() if value is not None})


def note(name: str, value: Any, lane: int | None = None) -> None:
  """Stores a scalar as the latest of its name, for bars to show; called by consumers of taps."""
  noted[name, lane] = (time.monotonic(), value)


@dataclasses.dataclass(frozen=True)
class Mark:
  """A bar, and the values that it reads of a loop's carry while the body is traced.

  Attributes:
    total: the value of `at` at the end, or the number of steps, for a bar that reads one of them.
  """

  bar: Bar
  at: Callable[[Any], Any] | None = None
  total: Any = None

  @classmethod
  def of(cls, options: Progress | None, steps: Any = None) -> Mark | None:
    """Returns the mark of a loop, whose number of steps may be a traced value."""
    if options is None:
      return None
    by_value = options.at is not None
    file = None if options.file is None else exact.exact_object(options.file)
    if file is not None and not type(options.file).__weakrefoffset__:
      _newest.append(file)
    total = None if by_value else options.total
    bar = Bar(
      text=_text_of(options, None if file is None else names.name(file)),
      every=int(options.every or 0),
      total=UNKNOWN if total is None else int(total),
      has_total=steps is not None and options.total is None,
      by_value=by_value,
      by_lane=options.lanes == "bars",
      engine=config.engine(),
      may_fail=isinstance(options, Automatic),
      file=file,
    )
    if bar.by_lane:
      delivery.tell_of_lanes(MOST_LANES)
    reads = options.total if by_value else steps if bar.has_total else None
    return cls(bar, options.at, reads)

  @contextmanager
  def around(self, carry: Any, changing: Sequence[Any]) -> Generator[None]:
    """Marks a body while it is traced; `changing` are arrays that tie the mark to the loop."""
    if self.bar.by_lane:  # shows the mark the mapped axes of the loop
      changing = [*changing, *_numbers_in(carry)]
    progress_p.bind(*self._numbers(carry), *changing, bar=self.bar)
    with deeper():
      yield

  def _numbers(self, carry: Any) -> list[Any]:
    if self.at is None:
      return [self.total] if self.bar.has_total else []
    at = jnp.asarray(self.at(carry))
    if at.shape or not jnp.issubdtype(at.dtype, np.number):
      raise GateDefinitionError(
        "Progress: at: expected a function from the carry to a number, got "
        f"{at.dtype}{list(at.shape)}"
      )
    numbers = (jnp.asarray(x).astype(np.float32) for x in (self.total, at))
    return list(map(jax.lax.stop_gradient, numbers))


@contextmanager
def deeper(has_bar: bool = True) -> Generator[None]:
  """Loops that are traced in the block are nested in a loop, which may have a bar."""
  _nesting.depth = getattr(_nesting, "depth", 0) + has_bar
  try:
    yield
  finally:
    _nesting.depth -= has_bar


def _changing(arguments: Any) -> list[Any]:
  """Returns the arguments' arrays that change in each step: counters if there are any."""
  numbers = _numbers_in(arguments)
  counters = [x for x in numbers if not jnp.shape(x) and jnp.issubdtype(x.dtype, np.integer)]
  return counters or numbers


def _numbers_in(tree: Any) -> list[Any]:
  leaves = [x for x in jax.tree.leaves(tree) if isinstance(x, Tracer)]
  return [x for x in leaves if jnp.issubdtype(x.dtype, np.number)]


@per_function.cached(256)
def _cached(function: exact.Exact, make: Callable[..., Any], more: exact.Exact) -> Any:
  return make(function.value, *more.value)


def wrapped(make: Callable[..., Any], function: Callable[..., Any], *more: Any) -> Any:
  """Returns `make(function, *more)`, one for each function, so that JAX's caches recognize it."""
  try:
    hash(more)
  except TypeError:  # because of an array among them
    return make(function, *more)
  return _cached(exact.exact_object(function), make, exact.exact(more))


def _parts(*arguments: Any) -> tuple[Any, list[Any]]:
  return arguments[0], _changing(arguments)


def marked(
  function: Callable[..., Any], mark: Mark | None, parts: Callable[..., Any] = _parts
) -> Callable[..., Any]:
  """Returns a body with the mark, if there is one; `parts` selects the arguments of `around`."""
  if mark is None:
    return function

  @functools.wraps(function, updated=())
  def body(*arguments: Any) -> Any:
    with mark.around(*parts(*arguments)):
      return function(*arguments)

  return body


@overload
def progress(description: _Body) -> _Body: ...


@overload
def progress(
  description: str | Progress | None = None, *, total: Any = None, every: int | None = None,
  show: Sequence[str] | None = None, file: TextIO | None = None, position: int | None = None,
  leave: bool = True, mininterval: float = 0.1, at: Callable[[Any], Any] | None = None,
  lanes: Lanes = "one", style: Style = "tqdm",
) -> Callable[[_Body], _Body]: ...  # fmt: skip


def progress(
  description: Any = None, *, total: Any = None, every: int | None = None,
  show: Sequence[str] | None = None, file: TextIO | None = None, position: int | None = None,
  leave: bool = True, mininterval: float = 0.1, at: Callable[[Any], Any] | None = None,
  lanes: Lanes = "one", style: Style = "tqdm",
) -> Any:  # fmt: skip
  """Decorates a loop's body, so that the loop of JAX or of a library has a progress bar.

  ```python
  @cg.progress("training")
  def step(state, batch):
    ...

  jax.lax.scan(step, state, batches)
  ```

  The body may be that of a `scan`, `fori_loop`, `while_loop` or `map`. The number of steps is the
  scan's, or `total`. All other arguments are those of `Progress`.

  Args:
    description: the text before the bar, or a `Progress` with all options. `@cg.progress` works
      without parentheses, too.

  Returns:
    A decorator; without parentheses the decorated body.
  """
  if isinstance(description, Progress):
    options = description
  elif description is None or isinstance(description, str) or callable(description):
    desc = description if isinstance(description, str) else None
    options = Progress(
      desc, total, every, show, file, position, leave, mininterval, at, lanes, style
    )
  else:
    raise GateDefinitionError(
      f"progress: expected a description, callgate.Progress or the loop's body, got {description!r}"
    )

  def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function, updated=())
    def body(*arguments: Any) -> Any:
      return wrapped(marked, function, Mark.of(options))(*arguments)

    setattr(body, _HAS_BAR, (function, options))
    return body

  return decorate(description) if callable(description) else decorate


def has_bar(body: Any) -> bool:
  """True if a loop's body is decorated, and so has a bar of its own."""
  while isinstance(body, functools.partial):
    body = body.func
  return hasattr(body, _HAS_BAR)


def undecorated(body: Any) -> tuple[Any, Progress] | None:
  """Returns the function behind a decorated body, and its bar's options; None for other bodies."""
  if isinstance(body, functools.partial):
    if (inner := undecorated(body.func)) is None:
      return None
    return functools.partial(inner[0], *body.args, **body.keywords), inner[1]
  own = getattr(body, _HAS_BAR, None)
  # A user's wrapper of the body has the attribute, too (`functools.wraps`).
  return own if own is not None and own[0] is getattr(body, "__wrapped__", None) else None


_part.on("tap value", note)
