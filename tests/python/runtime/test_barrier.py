# SPDX-License-Identifier: Apache-2.0
"""A gate's exception reaches the caller as it was raised; the runtime goes on afterwards."""

from __future__ import annotations

import concurrent.futures
import contextlib
import gc
import inspect
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import dispatch

import callgate as cg
from callgate._core import kept
from callgate._core.failures import defer
from callgate._jax import dispatch as _dispatch

SCALAR = jax.ShapeDtypeStruct((), np.float32)
X = np.float32(1)


class Failure(Exception):
  """An exception type of the user's, with state of its own."""

  def __init__(self, message: str, code: int = 0) -> None:
    super().__init__(message)
    self.code = code


def raiser(error: BaseException, **options: Any) -> cg.Gate:
  def fail(x: Any) -> Any:
    raise error

  return cg.gate(fail, **{"out": SCALAR, "effect": "io", **options})


def wait(program: Any, *args: Any) -> Any:
  return jax.block_until_ready(program(*args))


# -- the exception itself ---
@pytest.mark.parametrize("effect", ["pure", "io", "ordered"])
@pytest.mark.parametrize("thread", ["xla", "own"])
@pytest.mark.parametrize(
  "error", [ValueError("bad"), Failure("worse", code=7), KeyboardInterrupt(), SystemExit(3)]
)
def test_errors_raises_the_very_object(error: BaseException, thread: str, effect: str) -> None:
  program = jax.jit(raiser(error, thread=thread, effect=effect))
  with pytest.raises(type(error)) as caught, cg.errors():
    wait(program, X)
  assert caught.value is error
  assert cg.last_error() is error


@pytest.mark.parametrize("jit", [True, False])
def test_a_program_that_has_run_before_raises_the_very_object_too(jit: bool) -> None:
  """JAX raises ValueError where its C++ dispatch runs a program that fails at once."""
  error = Failure("negative", code=3)

  def check_sign(x: Any) -> Any:
    if x < 0:
      raise error
    return x

  gate = cg.gate(check_sign, out=SCALAR)
  program = jax.jit(gate) if jit else gate
  for _ in range(3):
    assert wait(program, X) == X
    with pytest.raises(Failure) as info, cg.errors():
      wait(program, -X)
    assert info.value is error


def test_a_value_error_of_the_users_own_passes_as_it_is() -> None:
  error = ValueError("not callgate's")
  with pytest.raises(ValueError, match="not callgate's") as info, cg.errors():
    raise error
  assert info.value is error


def test_the_traceback_ends_in_the_gates_function_and_the_note_says_where_it_was_called() -> None:
  @cg.gate(out=SCALAR, name="deep", effect="io")
  def deep(x: Any) -> Any:
    return innermost(x)

  def innermost(x: Any) -> Any:
    raise ValueError("down here")

  @jax.jit
  def program(x: Any) -> Any:
    return deep(x) + 1

  with pytest.raises(ValueError, match="down here") as caught, cg.errors():
    wait(program, X)
  names = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
  assert names[-2:] == ["deep", "innermost"]
  line = inspect.getsourcelines(program.__wrapped__)[1] + 2
  (note,) = caught.value.__notes__
  assert "gate 'deep'" in note
  assert f'File "{__file__}", line {line}, in ' in note
  assert note.endswith("program")


def test_a_gate_that_raises_twice_the_same_object_notes_the_place_once() -> None:
  error = ValueError("again")
  program = jax.jit(raiser(error))
  for _ in range(2):
    with pytest.raises(ValueError), cg.errors():
      wait(program, X)
  assert len(error.__notes__) == 1


def test_without_errors_jaxs_own_error_has_the_full_python_traceback() -> None:
  def cause() -> None:
    raise KeyError("the cause")

  @cg.gate(out=SCALAR, name="chained", effect="io")
  def chained(x: Any) -> Any:
    try:
      cause()
    except KeyError as error:
      raise Failure("the effect") from error

  with pytest.raises(jax.errors.JaxRuntimeError) as caught:
    wait(jax.jit(chained), X)
  text = str(caught.value)
  for part in (
    "gate 'chained'",
    "KeyError: 'the cause'",
    "direct cause",
    "Failure: the effect",
    "in chained",
    "in cause",
    __file__,
  ):
    assert part in text
  error = cg.last_error()
  assert isinstance(error, Failure)
  assert isinstance(error.__cause__, KeyError)


def test_the_chain_that_the_user_built_is_kept() -> None:
  inner, outer = KeyError("inner"), Failure("outer")

  @cg.gate(out=SCALAR, effect="io")
  def chained(x: Any) -> Any:
    try:
      raise inner
    except KeyError:
      raise outer  # noqa: B904 - implicit on purpose

  with pytest.raises(Failure) as caught, cg.errors():
    wait(jax.jit(chained), X)
  assert caught.value.__context__ is inner
  assert caught.value.__cause__ is None


def test_an_exception_group_passes() -> None:
  group = ExceptionGroup("many", [ValueError("a"), KeyError("b")])
  with pytest.raises(ExceptionGroup) as caught, cg.errors():
    wait(jax.jit(raiser(group)), X)
  assert caught.value is group


# -- where it may be raised ---
def test_a_nested_gates_error_passes_through_the_outer_one() -> None:
  error = Failure("inner")
  inner = jax.jit(raiser(error))

  @cg.gate(out=SCALAR, thread="own", effect="io")
  def outer(x: Any) -> Any:
    with cg.errors():
      return np.asarray(wait(inner, x))

  with pytest.raises(Failure) as caught, cg.errors():
    wait(jax.jit(outer), X)
  assert caught.value is error
  assert len(error.__notes__) == 2


def fails_at_3(x: Any) -> Any:
  if x == 3:
    raise Failure("three", code=int(x))
  return x


@pytest.mark.parametrize(
  "program",
  [
    lambda gate: lambda xs: jax.lax.fori_loop(0, 8, lambda i, c: c + gate(xs[i]), 0.0),
    lambda gate: lambda xs: jax.lax.cond(xs[3] == 3, gate, lambda x: x, xs[3]),
    lambda gate: jax.checkpoint(lambda xs: gate(xs[3])),
  ],
  ids=["fori_loop", "cond", "checkpoint"],
)
@pytest.mark.parametrize("thread", ["xla", "own"])
def test_an_error_surfaces_from_control_flow(program: Any, thread: str) -> None:
  gate = cg.gate(fails_at_3, out=lambda x: x, effect="io", thread=thread)
  with pytest.raises(Failure) as caught, cg.errors():
    wait(jax.jit(program(gate)), jnp.arange(8.0))
  assert caught.value.code == 3


def test_lanes_before_the_failing_one_have_run_and_later_ones_have_not() -> None:
  seen: list[float] = []

  @cg.gate(out=lambda x: x, effect="io")
  def record(x: Any) -> Any:
    seen.append(float(x))
    return fails_at_3(x)

  with pytest.raises(Failure), cg.errors():
    wait(jax.jit(jax.vmap(record)), jnp.arange(8.0))
  assert seen == [0, 1, 2, 3]


# -- afterwards ---


def test_a_failure_of_jaxs_own_passes_as_it_is() -> None:
  def fail(x: Any) -> Any:
    raise ValueError("not a gate")

  with pytest.raises(jax.errors.JaxRuntimeError, match="not a gate"), cg.errors():
    wait(jax.jit(lambda x: jax.pure_callback(fail, SCALAR, x)), X)


def test_an_exception_of_the_block_itself_wins() -> None:
  with pytest.raises(KeyError, match="mine"), cg.errors():  # noqa: PT012
    jax.jit(raiser(Failure("the gate's")))
    raise KeyError("mine")


# -- programs that nobody waits for ---
def slow_raiser(error: BaseException) -> Any:
  def fail(x: Any) -> Any:
    time.sleep(0.1)
    raise error

  gate = cg.gate(fail, out=lambda x: x, effect="io", thread="own")
  return jax.jit(lambda x: gate(x) + 1)


def test_the_end_of_the_block_raises_what_nobody_looked_at() -> None:
  error = Failure("unseen")
  with pytest.raises(Failure) as caught, cg.errors():
    slow_raiser(error)(jnp.zeros((64, 64)))
  assert caught.value is error


def test_barrier_waits_and_raises() -> None:
  error = Failure("at the barrier")
  result = slow_raiser(error)(jnp.zeros((64, 64)))
  with pytest.raises(Failure) as caught:
    cg.barrier()
  assert caught.value is error
  del result
  cg.barrier()


def test_barrier_gives_up_after_its_timeout() -> None:
  go_on = threading.Event()
  gate = cg.gate(lambda x: (go_on.wait(30), x)[1], out=lambda x: x, effect="io", thread="own")
  result = jax.jit(lambda x: gate(x) + 1)(jnp.zeros((64, 64)))
  with pytest.raises(TimeoutError, match=r"0\.05 s"):
    cg.barrier(timeout=0.05)
  go_on.set()
  cg.barrier(timeout=30)
  assert result.is_ready()


# -- many at once ---
@pytest.mark.parametrize("thread", ["xla", "own"])
def test_threads_that_fail_at_once_get_their_own_errors_and_the_others_none(thread: str) -> None:
  together = threading.Barrier(8)

  def body(x: Any) -> Any:
    if int(x) % 2:
      raise Failure("odd", code=int(x))
    return x

  program = jax.jit(cg.gate(body, out=lambda x: x, effect="io", thread=thread))
  wait(program, np.float32(0))

  def call(number: int) -> int | None:
    together.wait()
    try:
      with cg.errors():
        wait(program, np.float32(number))
    except Failure as error:
      return error.code
    return None

  with concurrent.futures.ThreadPoolExecutor(8) as pool:
    for _ in range(10):
      assert list(pool.map(call, range(8))) == [n if n % 2 else None for n in range(8)]


def failed_result(error: BaseException) -> Any:
  """The result of a program that has failed behind its caller's back."""
  dispatched = threading.Event()

  def fail(x: Any) -> Any:
    assert dispatched.wait(60)
    raise error

  gate = cg.gate(fail, out=lambda x: x, thread="own")
  result = jax.jit(lambda x: gate(x) + 1)(jnp.zeros((64, 64)))
  dispatched.set()
  while not result.is_ready():
    time.sleep(0.001)
  return result


def failing_anew() -> Callable[[Any], Any]:
  """A program that raises another exception each time: one that is raised again grows."""

  def fail(x: Any) -> Any:
    raise Failure("other")

  return jax.jit(cg.gate(fail, out=lambda x: x))


def test_a_failure_is_kept_while_many_others_are_raised() -> None:
  error = Failure("first", code=1)
  result = failed_result(error)
  other = failing_anew()
  for _ in range(320):
    with pytest.raises(Failure, match="other"), cg.errors():
      wait(other, X)
  with pytest.raises(Failure) as caught, cg.errors():
    result.block_until_ready()
  assert caught.value is error


def test_a_block_keeps_all_that_fails_in_it() -> None:
  """Also what nobody ever asks for."""
  error = Failure("first", code=1)
  other = failing_anew()
  with pytest.raises(Failure) as caught, cg.errors():  # noqa: PT012
    result = failed_result(error)
    for _ in range(320):
      with contextlib.suppress(jax.errors.JaxRuntimeError, ValueError):
        wait(other, X)
    result.block_until_ready()
  assert caught.value is error


@pytest.mark.parametrize("effect", ["pure", "io", "ordered"])
def test_errors_raises_the_very_object_from_jaxs_own_callbacks_too(effect: str) -> None:
  error = Failure("worse", code=7)
  with cg.config(engine="jax"):
    program = jax.jit(raiser(error, effect=effect))
    with pytest.raises(Failure) as caught, cg.errors():
      wait(program, X)
    assert caught.value is error
    assert "raised in gate" in error.__notes__[0]
    with pytest.raises(Exception, match="worse"):  # JAX's own, which has the text
      wait(program, X)
    with pytest.raises(Failure), cg.errors():
      program(X)  # its result is never looked at


def test_last_error_of_a_thread_is_not_that_of_another() -> None:
  mine, other = Failure("mine"), Failure("other")

  def failing(error: Failure) -> None:
    with cg.errors():
      wait(jax.jit(raiser(error)), X)

  program = jax.jit(raiser(mine))
  with pytest.raises(jax.errors.JaxRuntimeError):
    wait(program, X)
  with concurrent.futures.ThreadPoolExecutor(1) as pool:
    caught = pool.submit(lambda: pytest.raises(Failure, failing, other))  # noqa: RUF061
    assert caught.result().value is other
    assert pool.submit(cg.last_error).result() is other
  assert cg.last_error() in (mine, other)  # "other" if XLA ran it on a thread of its own


def test_last_error_knows_threads_of_xla_that_asked_python_who_they_are() -> None:
  error = Failure("from a named thread")

  @cg.gate(out=SCALAR, thread="own", effect="io")
  def fail(x: Any) -> Any:
    threading.current_thread()  # as logging does: makes an entry in threading.enumerate()
    raise error

  with pytest.raises(jax.errors.JaxRuntimeError):
    wait(jax.jit(fail), X)
  assert cg.last_error() is error


def test_the_store_of_errors_is_bounded() -> None:
  class Counted(Exception):
    pass

  def fail(x: Any) -> Any:
    raise Counted

  program = jax.jit(cg.gate(fail, out=lambda x: x, effect="io"))
  for _ in range(300):
    with pytest.raises(jax.errors.JaxRuntimeError):
      wait(program, np.float32(3))
  gc.collect()
  assert sum(type(o) is Counted for o in gc.get_objects()) <= 260


# -- interrupts ---
def test_an_interrupt_in_a_gate_is_no_exception_that_a_program_goes_on_after() -> None:
  def interrupted(x: Any) -> Any:
    raise KeyboardInterrupt("Ctrl-C")

  program = jax.jit(cg.gate(interrupted, out=lambda x: x))
  rounds: list[int] = []

  def go_on_after_errors() -> None:
    for i in range(10):
      with contextlib.suppress(Exception):
        jax.block_until_ready(program(1.0))
      rounds.append(i)

  with pytest.raises(KeyboardInterrupt, match="Ctrl-C"):
    go_on_after_errors()
  assert len(rounds) < 2


def test_an_interrupt_is_raised_wherever_the_main_thread_is() -> None:
  raised: list[BaseException | None] = []

  def keeps_a_failure() -> None:
    with kept._lock:  # pyright: ignore[reportPrivateUsage]
      raised.append(kept.take_for_main())

  kept.keep(KeyboardInterrupt("Ctrl-C"))
  thread = threading.Thread(target=keeps_a_failure, daemon=True)
  thread.start()
  thread.join(60)
  assert [str(one) for one in raised] == ["Ctrl-C"]


def test_an_interrupt_of_a_block_is_raised_once() -> None:
  def interrupted(x: Any) -> Any:
    raise KeyboardInterrupt("Ctrl-C")

  program = jax.jit(cg.gate(interrupted, out=lambda x: x))
  with pytest.raises(KeyboardInterrupt, match="Ctrl-C"), cg.errors():
    jax.block_until_ready(program(1.0))
  for _ in range(100):  # where another one would come
    len([])


def test_a_deferred_error_of_the_runtimes_own_is_raised_too() -> None:
  defer("INTERNAL: what no Python exception stands for")
  with pytest.raises(jax.errors.JaxRuntimeError, match="no Python exception stands for"):
    cg.barrier()
  cg.barrier()


# -- GPUs ------------------------------------------------------------------------------------------
class FailedToken:
  """The token that JAX keeps of an ordered program that has failed on a GPU."""

  def __init__(self) -> None:
    self._buf = self

  def is_ready(self) -> bool:
    return True

  def block_until_ready(self) -> None:
    raise jax.errors.JaxRuntimeError("the first program's error")


def test_ordered_programs_run_after_one_that_has_failed() -> None:
  tokens = dispatch.runtime_tokens.current_tokens
  seen: list[float] = []
  gate = cg.gate(lambda x: seen.append(float(x)), out=(), effect="ordered")
  program = jax.jit(lambda x: (gate(x), x)[1])
  jax.block_until_ready(program(X))
  tokens.update(dict.fromkeys(tokens, FailedToken()))
  with contextlib.suppress(jax.errors.JaxRuntimeError), cg.errors():
    cg.barrier()
  jax.block_until_ready(program(X))
  cg.barrier()
  assert seen == [1.0, 1.0]


def test_all_backends_arrays_are_waited_for_and_none_is_asked_by_name(
  monkeypatch: pytest.MonkeyPatch,
) -> None:
  def missing(backend: str | None = None, **_: Any) -> Any:
    raise RuntimeError(f"Unknown backend {backend}")

  monkeypatch.setattr(jax, "live_arrays", missing)
  monkeypatch.setattr(jax, "local_devices", missing)
  cg.barrier()
  with pytest.raises(RuntimeError, match="a test needs JAX's CPU backend; add 'cpu' to"):
    _dispatch.cpu_devices("a test")


@pytest.mark.parametrize("effect", ["pure", "io", "ordered"])
def test_a_call_that_another_thread_is_in_is_waited_for(effect: Any) -> None:
  begun, goes_on, ended = threading.Event(), threading.Event(), threading.Event()

  def body(x: Any) -> Any:
    begun.set()
    goes_on.wait(10)
    return x

  program = jax.jit(cg.gate(body, out=lambda x: x, effect=effect))

  def call() -> None:
    jax.block_until_ready(program(np.float32(1)))
    ended.set()

  goes_on.set()
  call()  # compiled, so that the thread's is a later call
  for event in (begun, goes_on, ended):
    event.clear()
  thread = threading.Thread(target=call)
  thread.start()
  assert begun.wait(10)
  threading.Timer(0.05, goes_on.set).start()
  cg.barrier()
  assert goes_on.is_set()
  thread.join()


def test_a_barrier_in_a_consumer_waits_for_no_call_that_waits_for_the_consumer() -> None:
  seen: list[float] = []

  def consume(value: Any) -> None:
    with contextlib.suppress(TimeoutError, RuntimeError):
      cg.barrier(timeout=0.5)
    seen.append(float(value))

  with cg.channel("test barrier full", capacity=64, to=consume):
    send = lambda n, _: (cg.tap(n, "test barrier full"), None)
    thread = threading.Thread(target=jax.jit(lambda: jax.lax.scan(send, 0.0, length=3)[0]))
    thread.start()
    thread.join(30)
  assert seen == [0, 0, 0]


def test_failures_that_were_raised_keep_few_frames() -> None:
  class Local:
    pass

  live: weakref.WeakSet[Local] = weakref.WeakSet()

  def body(x: Any) -> Any:
    local = Local()
    live.add(local)
    raise ValueError("test frames")

  program = jax.jit(cg.gate(body, out=lambda x: x, effect="io"))
  for _ in range(12):
    with pytest.raises(ValueError, match="test frames"), cg.errors():
      program(1.0)
  del body
  gc.collect()
  assert len(live) <= 6


def test_a_block_for_errors_does_not_wait_for_a_call_that_another_thread_is_in() -> None:
  begun, goes_on = threading.Event(), threading.Event()
  body = lambda x: (begun.set(), goes_on.wait(10), x)[2]
  thread = threading.Thread(target=jax.jit(cg.gate(body, out=lambda x: x)), args=(np.float32(1),))
  thread.start()
  assert begun.wait(10)
  with cg.errors():
    pass
  assert not goes_on.is_set()
  goes_on.set()
  thread.join()
