# SPDX-License-Identifier: Apache-2.0
"""JAX's dispatch: runtime tokens, the filter of effects, hooks at executions, backends."""

from __future__ import annotations

import collections
import contextlib
import functools
import os
import queue
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax._src import config as _config
from jax._src import dispatch as _dispatch
from jax._src import source_info_util as _source_info
from jax._src import xla_bridge as _bridge
from jax._src.lib import guard_lib as _guards  # pyright: ignore[reportPrivateImportUsage]
from jax._src.lib import xla_client as _xla_client  # pyright: ignore[reportPrivateImportUsage]

from callgate import _part
from callgate._jax import collected, cpp_path
from callgate._part import Wait

# JAX keeps the tokens of dispatched programs separately for each thread, and `jax.effects_barrier`
# waits for its own thread's (0.10 to 0.12). There is no public way to wait for another thread's.
# Atomic: single steps; emptied by whoever waits for the programs.
_effect_tokens: dict[Any, Any] = {}
_local = threading.local()


def remember_effects() -> None:
  """Keeps the latest token of each thread, device and ordered effect where all threads see it."""
  tokens: Any = _dispatch.RuntimeTokenSet

  def remembering(original: Callable[..., None]) -> Callable[..., None]:
    def remember(self: Any, of: Any, token: Any) -> None:
      if not _waiters:
        with contextlib.suppress(RuntimeError):  # raised at the end of the process: see `_waiters`
          _waiters.append(_idle_waiter())
      _effect_tokens[threading.get_ident(), of] = token
      original(self, of, token)

    return remember

  def block_until_ready(self: Any) -> None:
    failure, _local.failure = getattr(_local, "failure", None), None
    but = getattr(_local, "but", None)
    try:
      wait(self)
    except Exception as error:  # noqa: BLE001 - whatever its program failed with
      failure = failure or error
    failures = [one for one in (*cpp_path.take_failures(), failure) if one is not None]
    for failure in failures:
      if but is None or not but(failure):
        raise failure
    if but is None:
      _part.tell("effects barrier")

  wait = tokens.block_until_ready
  tokens.block_until_ready = block_until_ready
  tokens.set_output_runtime_token = remembering(tokens.set_output_runtime_token)
  tokens.set_token_result = remembering(tokens.set_token_result)


def programs_have_ended() -> bool:
  """Returns True if no dispatched program with effects runs, on any thread.

  JAX's own tokens have no such test (0.10 to 0.12): another thread waits for them, and the result
  is False until it has waited.
  """
  global _asked
  if not cpp_path.have_ended():
    return False
  if _effect_tokens:
    if _asked is None or _asked.is_set():
      _asked = threading.Event()
      try:
        _idle_waiter().put(_asked)
      except RuntimeError:  # too late for a thread
        return False
    _asked.wait(0.001)
  return not _effect_tokens


# Atomic: one assignment, and a second request changes nothing.
_asked: threading.Event | None = None


def effects_barrier_alone(but: Callable[[BaseException], bool] = lambda _: False) -> None:
  """Runs `jax.effects_barrier()` without the parts that listen to it.

  JAX keeps the token of a device's last program, and so raises its error each time. This raises it
  once (0.10 to 0.12), or not at all if `but(error)` is True.
  """
  _local.but = but
  try:
    jax.effects_barrier()
  except Exception:
    _forget_failed_outputs()
    raise
  finally:
    _local.but = None


def _forget_failed_outputs() -> None:
  tokens: dict[Any, Any] = _dispatch.runtime_tokens.output_runtime_tokens
  for device, token in list(tokens.items()):
    try:
      token.block_until_ready()
    except Exception:  # noqa: BLE001 - whatever its program failed with
      tokens.pop(device, None)


def forget_effects() -> None:
  """Makes `jax.effects_barrier` and JAX's exit skip the running programs (0.10 to 0.12)."""
  _effect_tokens.clear()
  cpp_path.forget()
  _dispatch.runtime_tokens.clear()


def wait_for_effects(wait: Wait) -> bool:
  """Waits for all threads' dispatched programs with effects. False if the time ran out.

  `jax.effects_barrier` raises their errors in the threads that dispatched them.
  """
  if not (_effect_tokens or cpp_path.pending()):
    return True
  requests = None
  if not wait.is_plain:
    # Tokens have no wait with a time limit, so another thread waits. If no thread can be started
    # anymore, such late programs ran during their dispatch.
    with contextlib.suppress(RuntimeError):
      requests = _idle_waiter()
  if requests is None:
    _wait_for_tokens()
    return True
  requests.put(done := threading.Event())
  return wait.until(done.wait)


# The requests of each idle thread that waits for tokens for another thread. The first program with
# effects starts one, because Python 3.12 starts no threads at the end of the process.
# Atomic: single steps; at most one entry for each thread that has waited.
_waiters: collections.deque[queue.SimpleQueue[threading.Event]] = collections.deque()
forget_waiters = _waiters.clear  # in a forked child, which has none of these threads


def _idle_waiter() -> queue.SimpleQueue[threading.Event]:
  """Removes and returns an idle waiter, or starts one."""
  with contextlib.suppress(IndexError):
    return _waiters.pop()
  requests: queue.SimpleQueue[threading.Event] = queue.SimpleQueue()

  def wait_on_request() -> None:
    while True:
      done = requests.get()
      _wait_for_tokens()
      _waiters.append(requests)
      done.set()

  threading.Thread(target=wait_on_request, name="callgate barrier", daemon=True).start()
  return requests


def _wait_for_tokens() -> None:
  for key, token in list(_effect_tokens.items()):
    with contextlib.suppress(Exception):
      token.block_until_ready()
    if _effect_tokens.get(key) is token:
      _effect_tokens.pop(key, None)
  cpp_path.wait()


def own_tokens() -> list[Any]:
  """Returns the tokens of this thread's programs."""
  thread = threading.get_ident()
  return [token for (of, _), token in list(_effect_tokens.items()) if of == thread]


def wait_for_own(effect: Any) -> None:
  """Waits for this thread's programs with an ordered effect; ignores their errors."""
  cpp_path.wait(threading.get_ident())
  if (token := _effect_tokens.get((threading.get_ident(), effect))) is not None:
    with contextlib.suppress(Exception):
      token.block_until_ready()


_EXECUTION = os.path.join(os.path.dirname(__file__), "execution.py")  # wraps JAX's executions


def first_calls(frames: Iterable[Any]) -> list[tuple[Any, Any]]:
  """Returns (function, jaxpr) of each jitted function whose first call executes in `frames`.

  Other threads that call the function wait for that call to end (0.10 to 0.12). No public name.
  """
  found: list[tuple[Any, Any]] = []
  for top in frames:
    if top.f_code.co_filename == _EXECUTION and top.f_code.co_name == "execute_sharded":
      top = top.f_back
    if os.path.basename(top.f_code.co_filename) != "pxla.py" or top.f_code.co_name != "__call__":
      continue
    frame, jaxpr = top, None
    while frame is not None:
      names = frame.f_code.co_varnames
      if jaxpr is None and "jaxpr" in names:
        jaxpr = frame.f_locals.get("jaxpr")
      if frame.f_code.co_name == "cache_miss" and "fun" in frame.f_code.co_freevars:
        found.append((frame.f_locals["fun"], jaxpr))
        jaxpr = None
      frame = frame.f_back
  return found


def is_jitted(value: Any) -> bool:
  """Returns True if a value is a function that `jax.jit` made. jaxlib's type of it is private."""
  return issubclass(type(value), _jitted_type())  # reads no property of the value


@functools.cache
def _jitted_type() -> type[Any]:
  return type(jax.jit(lambda: None))


def keep_with_program(context: Any, value: object) -> None:
  """Keeps `value` alive as long as the module being lowered, which `jax.stages.Lowered` keeps.

  JAX's own keepalive makes `jax.export` refuse the program (0.10 to 0.12).
  """
  weakref.finalize(context.module_context.module, id, value).atexit = False


# Excludes files under a path from the user's code in JAX's tracebacks.
exclude_from_tracebacks: Callable[[str], None] = _source_info.register_exclusion


# -- dispatch --------------------------------------------------------------------------------------
def mark_host_callbacks(context: Any) -> None:
  """Marks the program being lowered as one with callbacks of JAX (0.10 to 0.12).

  XLA's CPU client then runs it on the dispatching thread, and `jax.effects_barrier` waits for it.
  """
  context.module_context.add_host_callback(lambda: None)


# -- waiting ---------------------------------------------------------------------------------------
# True if JAX has started its devices (0.10 to 0.12); no public name.
has_backend: Callable[[], bool] = _bridge.backends_are_initialized


def _backends() -> Sequence[Any]:
  """Returns the started backends (0.10 to 0.12)."""
  return list(_bridge.backends().values()) if has_backend() else []


def live_arrays() -> Sequence[Any]:
  """Returns all arrays of all started backends."""
  if collected.NEEDED:
    return collected.live_arrays()
  return [array for backend in _backends() for array in backend.live_arrays()]


def local_devices() -> dict[str, list[Any]]:
  """Returns this process's devices of each started backend, by platform."""
  return {backend.platform: list(backend.local_devices()) for backend in _backends()}


def cpu_devices(what: str | None = None) -> list[Any]:
  """Returns this process's CPU devices; JAX may have none (JAX_PLATFORMS).

  If there are none, it raises a RuntimeError that names `what`, which needs them. Without `what`
  it returns [].
  """
  with contextlib.suppress(RuntimeError):
    return jax.local_devices(backend="cpu")
  if what is None:
    return []
  raise RuntimeError(
    f"callgate: {what} needs JAX's CPU backend; add 'cpu' to JAX_PLATFORMS, got "
    f"{_config.jax_platforms.value!r}"
  )


def forget_failed_tokens(kind: type[Any] = object) -> BaseException | None:
  """Lets this thread run programs with an ordered `kind` after one has failed (0.10, 0.11).

  JAX passes them the last program's token. A failed program's token on a GPU has failed, too, and
  would make all following programs fail. Returns the error of the first failed program.
  """
  tokens: dict[Any, Any] = _dispatch.runtime_tokens.current_tokens
  failure: BaseException | None = None
  for effect, token in list(tokens.items()):
    if isinstance(effect, kind) and token._buf.is_ready():
      try:
        token.block_until_ready()
      except Exception as error:  # noqa: BLE001 - whatever its program failed with
        del tokens[effect]
        failure = failure or error
  return failure


def run_after_failures(kind: type[Any]) -> None:
  """Lets programs with an ordered `kind` run even if the last of them is known to have failed.

  This thread's next `jax.effects_barrier()` raises the error.
  """
  tokens: Any = _dispatch.RuntimeTokenSet
  original = tokens.get_token_input

  def get_token_input(self: Any, effect: Any, devices: Any) -> Any:
    if isinstance(effect, kind):
      _local.failure = getattr(_local, "failure", None) or forget_failed_tokens(kind)
    return original(self, effect, devices)

  tokens.get_token_input = get_token_input


def fast_device_put(device: Any) -> Callable[[Any, Any, Any], Any]:
  """Returns `put(aval, sharding, [array])`, which makes a committed jax.Array on the device.

  `jax.device_put` ends in this function, which takes a tenth of its time (jaxlib 0.10 to 0.12). If
  `jax.device_put` becomes fast, use that. An aligned array's memory is shared, so it must never
  change again. For `jax.transfer_guard` it is an explicit transfer, like `jax.device_put`.
  """
  jaxlib: Any = _xla_client
  committed, force_copy, keep_x64 = True, False, True
  rest = committed, force_copy, jaxlib.HostBufferSemantics.ZERO_COPY, keep_x64
  devices, make, guards_of_thread = [device], jaxlib.batched_device_put, _guards.thread_local_state

  def put(aval: Any, sharding: Any, arrays: Any) -> Any:
    guards = guards_of_thread()
    before = guards.explicit_device_put
    guards.explicit_device_put = True
    try:
      return make(aval, sharding, arrays, devices, *rest)
    finally:
      guards.explicit_device_put = before

  return put
