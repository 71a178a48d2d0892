# SPDX-License-Identifier: Apache-2.0
"""Exceptions of classes that refuse notes, texts or comparisons reach their callers too."""

from __future__ import annotations

import ast
import concurrent.futures
import contextlib
import dataclasses
import logging
import pathlib
import pickle
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest

import callgate as cg
from callgate import sinks
from callgate._core import foreign
from callgate._places import travel
from callgate._replay import raised

X = np.float32(1)
SCALAR = jax.ShapeDtypeStruct((), np.float32)


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
  """Its attributes can't be set, so Python's `add_note` raises."""

  step: int


class Closed(Exception):
  __slots__ = ("a",)

  def __setattr__(self, name: str, value: object) -> None:
    raise RuntimeError(f"no {name}")


class Silent(Exception):
  def __str__(self) -> str:
    raise ValueError("no text")

  __repr__ = __str__


class Aborting(Exception):
  def __str__(self) -> str:
    raise SystemExit(3)


class TextOfItsOwn(Exception):
  def __str__(self) -> str:
    class Text(str):
      def __format__(self, spec: str) -> str:
        raise ValueError("no format")

    return Text("said")


class Liar(Exception):
  @property
  def __class__(self) -> Any:
    return cg.CheckError


class NoClass(Exception):
  @property
  def __class__(self) -> Any:
    raise OSError("no class")


class Incomparable(Exception):
  __hash__ = None  # type: ignore[assignment]

  def __eq__(self, other: object) -> bool:
    raise TypeError("not comparable")


class Hidden(Exception):
  """An exception whose attributes raise when Python itself looks them up to show it."""

  @property
  def __notes__(self) -> Any:
    raise OSError("no notes")

  @property
  def __cause__(self) -> Any:
    raise OSError("no cause")

  @property
  def __traceback__(self) -> Any:
    raise OSError("no traceback")


class Nameless(type):
  @property
  def __name__(cls) -> str:
    raise OSError("no name")


class OfNamelessClass(Exception, metaclass=Nameless):
  pass


class Fatal(BaseException):
  pass


class Takes(Exception):
  """Has the names of callgate's own errors' attributes."""

  takes, lost, site, said = 3, "many", None, None


def with_text_for_notes() -> Exception:
  error = ValueError("notes")
  error.__notes__ = "not a list"  # type: ignore[assignment]
  return error


MAKERS: dict[str, Callable[[], BaseException]] = {
  "frozen": lambda: Frozen(3),
  "closed": Closed,
  "silent": Silent,
  "aborting": Aborting,
  "text of its own": TextOfItsOwn,
  "liar": Liar,
  "no class": NoClass,
  "incomparable": Incomparable,
  "hidden": Hidden,
  "nameless": OfNamelessClass,
  "fatal": Fatal,
  "takes": Takes,
  "notes": with_text_for_notes,
  "group": lambda: ExceptionGroup("several", [Frozen(1), Silent()]),
  "chained": lambda: chained(),
}


def chained() -> Exception:
  error = ValueError("last")
  foreign.set_cause(error, Frozen(1))
  return error


@pytest.fixture(params=MAKERS)
def error(request: pytest.FixtureRequest) -> BaseException:
  """An exception; tests compare it by `check_raises`, since pytest's own reports show it."""
  return MAKERS[request.param]()


# The exception that each function below raises, so that all exceptions share its compiled program.
RAISED: list[BaseException] = []


def fail(*args: Any) -> Any:
  raise RAISED[0]


def check_raises(call: Callable[[], object], error: BaseException) -> None:
  """Has the functions below raise the exception, and expects it, itself, from the call."""
  RAISED[:] = [error]
  caught: BaseException | None = None
  try:
    call()
  except BaseException as one:  # noqa: BLE001 - compared below
    caught = one
  finally:
    RAISED.clear()
  if caught is not error:  # without pytest's own look at the objects
    raise AssertionError(f"raised {foreign.traceback_of(caught) if caught else 'nothing'}")


@contextlib.contextmanager
def installed() -> Iterator[None]:
  cg.install()
  logging.disable()  # JAX logs what its callbacks raise, with pytest's handler
  try:
    yield
  finally:
    logging.disable(logging.NOTSET)
    cg.uninstall()


def in_errors(program: Callable[..., Any]) -> Callable[[], object]:
  def call() -> None:
    with cg.errors():
      jax.block_until_ready(program(X))

  return call


GATES = {
  "pure": jax.jit(cg.gate(fail, out=SCALAR)),
  "io": jax.jit(cg.gate(fail, out=SCALAR, effect="io")),
  "own thread": jax.jit(cg.gate(fail, out=SCALAR, effect="io", thread="own")),
  "executor": jax.jit(
    cg.gate(fail, out=SCALAR, effect="io", run_on=concurrent.futures.ThreadPoolExecutor(1))
  ),
  "hold": jax.jit(cg.hold(fail)),
  "tap": jax.jit(lambda x: cg.tap(x, fail)),
}


@pytest.mark.parametrize("place", GATES)
def test_a_block_of_errors_raises_the_very_object(place: str, error: BaseException) -> None:
  for _ in range(2):  # a second call takes JAX's C++ dispatch
    check_raises(in_errors(GATES[place]), error)


def test_last_error_is_the_very_object(error: BaseException) -> None:
  RAISED[:] = [error]
  with contextlib.suppress(jax.errors.JaxRuntimeError):
    GATES["io"](X).block_until_ready()
  assert cg.last_error() is error


def test_jaxs_engine_gives_the_very_object_too(error: BaseException) -> None:
  with cg.config(engine="jax"):
    check_raises(in_errors(GATES["pure"]), error)


def test_jaxs_own_callbacks_give_the_very_object_too(error: BaseException) -> None:
  with installed():
    program = jax.jit(lambda x: jax.pure_callback(fail, SCALAR, x))
    check_raises(in_errors(program), error)


def test_a_feed_raises_the_very_object_at_each_item(error: BaseException) -> None:
  def made() -> Iterator[Any]:
    raise error
    yield X

  with cg.feed(made(), shape=SCALAR) as items:
    program = jax.jit(lambda x: items.next() + x)
    for _ in range(2):
      check_raises(in_errors(program), error)


@pytest.mark.parametrize("batch", [None, True])
def test_a_consumer_is_called_for_the_rest_of_its_batch(error: Any, batch: Any) -> None:
  opened: list[cg.Channel] = []

  def run() -> None:
    with cg.channel("foreign.rest", to=[fail, fail], batch=batch) as channel:
      opened.append(channel)
      for _ in range(3):
        jax.jit(lambda x: cg.tap(x, "foreign.rest"))(X)

  check_raises(run, error)
  assert opened[0].stats()["lost"] == 6


def test_a_second_exception_does_not_hide_the_first(error: BaseException) -> None:
  first = Frozen(0)
  each = iter([first, error])

  def consume(value: Any) -> None:
    raise next(each)

  def run() -> None:
    with cg.channel("foreign.two", to=consume):
      for _ in range(2):
        jax.jit(lambda x: cg.tap(x, "foreign.two"))(X)

  check_raises(run, first)
  (other,) = vars(first)["callgate_others"]
  assert other is error
  assert foreign.name_of(error) in foreign.notes_of(first)[-1]


def test_a_sink_that_raises_loses_its_batch_alone(error: BaseException) -> None:
  class Failing(sinks.Sink):
    write = staticmethod(fail)

  with cg.channel("foreign.sink", to=Failing()) as channel:

    def run() -> None:
      jax.jit(lambda x: cg.tap(x, "foreign.sink"))(X)
      cg.barrier()

    check_raises(run, error)
  assert channel.stats()["lost"] == 1


def test_an_exception_of_another_process_arrives(error: BaseException) -> None:
  arrived = travel.unpack("gate 'g'", travel.pack(error))
  if not foreign.is_a(error, ExceptionGroup):  # of which one has no pickle
    assert type(arrived) is type(error)
  assert foreign.name_of(error) in foreign.traceback_of(arrived)


def test_a_frozen_exception_of_another_process_has_its_attributes() -> None:
  arrived = travel.unpack("gate 'g'", travel.pack(Frozen(3)))
  assert arrived == Frozen(3)
  assert arrived.args == (3,)


class Unpicklable(Exception):
  def __reduce__(self) -> Any:
    raise ValueError("no pickle")


class PicklesToAnother(Exception):
  def __reduce__(self) -> Any:
    return int, (3,)


@pytest.mark.parametrize("kind", [Unpicklable, PicklesToAnother])
def test_an_exception_without_a_pickle_arrives_as_text(kind: type[Exception]) -> None:
  arrived = travel.unpack("gate 'g'", travel.pack(kind("lost")))
  assert type(arrived) is cg.WorkerError
  assert f"raised {kind.__name__}" in str(arrived)
  assert "lost" in str(arrived.__cause__)


def test_a_recording_describes_it(error: BaseException) -> None:
  made = raised.make("recording", raised.text_of(error), b"", trust=False)
  assert type(error).__qualname__ in foreign.said_by(made)


def test_an_exception_that_a_consumer_raises_again_and_again_has_bounded_notes() -> None:
  singleton = ValueError("always")

  def consume(value: Any) -> None:
    raise singleton

  program = jax.jit(lambda: jax.lax.fori_loop(0, 500, lambda i, c: cg.tap(i, "foreign.many"), 0))
  channel = cg.channel("foreign.many", to=consume)
  with pytest.raises(ValueError, match="always"), channel:
    program()
  assert channel.stats()["lost"] == 500
  assert len(singleton.__notes__) <= 70


def test_the_text_of_a_failing_text_says_why() -> None:
  assert foreign.text_of(Silent()) == "(Silent: its str() raised ValueError)"
  assert foreign.repr_of(Silent()) == "<Silent: its repr() raised ValueError>"
  assert foreign.said_by(TextOfItsOwn()) == "TextOfItsOwn: said"
  assert foreign.traceback_of(Hidden("x")).endswith("OSError in its attributes)")
  assert foreign.traceback_of(ValueError("x")) == "ValueError: x"


def test_notes_are_added_once_and_pickled_with_the_exception() -> None:
  error = Frozen(3)
  for _ in range(2):
    foreign.add_note(error, "where")
  assert vars(error)["__notes__"] == ["where"]
  assert "where" in "".join(traceback.format_exception(error))
  assert pickle.loads(pickle.dumps(ValueError("x"))).args == ("x",)


# -- arrays that NumPy can't have ------------------------------------------------------------------
def reshaped(rank: int, call: Callable[[Any], Any]) -> Callable[[], Any]:
  return lambda: jax.jit(lambda x: call(jax.numpy.reshape(x, (1,) * rank)))(X)


@pytest.mark.parametrize(
  ("call", "what"),
  [
    (lambda x: cg.tap(x, print), "tap 'print': leaf 0"),
    (lambda x: cg.print("{}", x), "tap 'print': leaf 0"),
    (lambda x: cg.check(x.all(), "no {x}", x=x), "argument 'x'"),
    (cg.gate(lambda value: X, out=SCALAR), "argument 'value'"),
    (cg.gate(lambda value: X, out=jax.ShapeDtypeStruct((1,) * 65, X.dtype)), "argument 'value'"),
  ],
)
def test_an_array_of_65_dimensions_is_refused_by_name(call: Any, what: str) -> None:
  with pytest.raises(cg.GateDefinitionError) as caught:
    reshaped(65, call)()
  assert what in str(caught.value)
  assert "at most 64 dimensions" in str(caught.value)


def test_records_that_can_not_be_made_are_counted_and_raised() -> None:
  """Stacked, a value of 64 dimensions has one too many."""
  channel = cg.channel("foreign.stacked", to=print, batch=True)
  with pytest.raises(cg.ConsumerError, match="1 record"), channel:
    reshaped(64, lambda x: cg.tap(x, "foreign.stacked"))()
  assert channel.stats()["lost"] == 1


# -- one place -------------------------------------------------------------------------------------
def test_one_file_alone_adds_notes_and_shows_exceptions() -> None:
  package = pathlib.Path(cg.__file__).parent
  names = {"add_note", "format_exception", "print_exception", "print_exc", "format_exc"}
  found: list[str] = []
  for path in sorted(package.rglob("*.py")):
    if path.name != "foreign.py":
      calls = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
      attributes = (call.func for call in calls if isinstance(call.func, ast.Attribute))
      found += [
        f"{path.relative_to(package)}:{one.lineno}"
        for one in attributes
        if one.attr in names and not (isinstance(one.value, ast.Name) and one.value.id == "foreign")
      ]
  assert found == []
