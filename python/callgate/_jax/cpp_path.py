# SPDX-License-Identifier: Apache-2.0
"""Programs with effects on JAX's C++ dispatch path (docs/design_programs.md, Dispatch).

JAX leaves that path if an executable reports an effect, for two reasons (0.10 to 0.12; there is no
public API). First, its C++ code keeps no token of a program for `jax.effects_barrier` to wait for.
Here a program gets one more result, its *sign*, a byte that is ready, or failed, when the program
has ended. Second, JAX passes ordered effects' tokens from program to program. Here a program makes
its own tokens, if XLA runs a device's programs in order.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import core as _core
from jax._src import dispatch as _dispatch
from jax._src import sharding_impls as _sharding_impls
from jax._src import tree_util as _tree_util
from jax._src import xla_bridge as _bridge
from jax._src.interpreters import mlir as _mlir
from jax._src.interpreters import pxla as _pxla
from jax._src.lib import _jax as _jaxlib  # pyright: ignore[reportPrivateImportUsage, reportPrivateUsage]
from jax._src.lib.mlir import ir as _ir  # pyright: ignore[reportPrivateImportUsage]
from jax._src.lib.mlir.dialects import func as _func
from jax._src.lib.mlir.dialects import hlo as _hlo

from callgate import _callgate, _part

# The sign of the last call, which `bindings/python/signs.cc` adds, by (thread, program). Atomic:
# single steps; emptied by whoever waits for the programs, or `_prune`.
_signs: dict[tuple[int, int], Any] = {}
_PRUNE_AT = 1024  # the number of signs at which ready ones are dropped
_numbers = itertools.count()


class RunsPrograms:
  """Marks a program whose functions may run programs: no thread may dispatch far ahead of it."""


class _Program:
  """A loaded program with a sign.

  Attributes:
    sharding: the sign's sharding.
    key: two values. The first is the program's number, or None if its effects need no wait. The
      second is True if its functions may run programs.
    users: the objects that run it.
  """

  def __init__(self, sharding: Any, is_waited_for: bool, runs_programs: bool) -> None:
    self.sharding = sharding
    self.key = (next(_numbers) if is_waited_for else None, runs_programs)
    self.users: set[weakref.ref[Any]] = set()


# By the id of the XLA executable. Atomic: single steps; emptied by the end of each program.
_programs: dict[int, _Program] = {}
_orders_itself = threading.Event()  # set once a program makes its own tokens


# The type of a sign, which no user's result has: only values of Python's types are weakly typed.
_SIGN = _core.ShapedArray((), np.dtype(np.int8), weak_type=True)


def _is_signed(avals: Sequence[Any]) -> bool:
  """Returns True if the last result is a sign, also for an unpickled program."""
  last: Any = avals[-1] if avals else None
  return bool(getattr(last, "weak_type", False)) and last.dtype == _SIGN.dtype


class _Signed:
  """A program's results and its sign, as a node of its output tree."""


def _prune() -> int:
  for key, sign in list(_signs.items()):
    with contextlib.suppress(Exception):  # a failed sign stays for the barrier
      if sign.is_ready():
        sign.block_until_ready()
        _forget(key, sign)
  return max(_PRUNE_AT, 2 * len(_signs))


def _forget(key: tuple[int, int], sign: Any) -> None:
  if _signs.get(key) is sign:
    _signs.pop(key, None)


def pending() -> bool:
  """Returns True if a sign needs a wait."""
  return bool(_signs)


def have_ended() -> bool:
  """Returns True if no program with a sign runs."""
  return all(sign.is_ready() for sign in list(_signs.values()))


def own_signs() -> list[Any]:
  """Returns the signs of this thread's running programs."""
  own = threading.get_ident()
  signs = [sign for (thread, _), sign in list(_signs.items()) if thread == own]
  return [sign for sign in signs if not sign.is_ready()]


def forget() -> None:
  """Drops the signs of all running programs, so that nothing waits for them."""
  _signs.clear()
  _callgate.take_signs_ahead()


def after_fork() -> None:
  """Resets the state in a forked child. Old signs stay: the parent's threads may hold locks."""
  _of_parent.append([*_signs.values(), *_callgate.take_signs_ahead()])
  _signs.clear()


# One thread: a forked child has no other; never emptied: a fork of a fork adds an entry.
_of_parent: list[list[Any]] = []


def wait(thread: int | None = None) -> None:
  """Waits for the programs of a thread, or of all threads, on the C++ path.

  `take_failures` returns their errors in the thread that dispatched them.
  """
  alive = {one.ident for one in threading.enumerate()} if _signs else ()
  for key, sign in list(_signs.items()):
    if thread is None or key[0] == thread:
      try:
        sign.block_until_ready()
      except Exception:  # noqa: BLE001 - whatever the program failed with
        if key[0] in alive:
          continue
      _forget(key, sign)


def take_failures() -> list[BaseException]:
  """Waits for this thread's programs; returns the errors of those that failed."""
  failures: list[BaseException] = []
  thread = threading.get_ident()
  for key, sign in [item for item in list(_signs.items()) if item[0][0] == thread]:
    try:
      sign.block_until_ready()
    except Exception as error:  # noqa: BLE001 - whatever the program failed with is passed on
      failures.append(error)
    _forget(key, sign)
  return failures


def _unload(executable: int, user: weakref.ref[Any]) -> None:
  program = _programs[executable]
  program.users.discard(user)
  if not program.users:
    _programs.pop(executable, None)  # the last two users may end at once


def _runs_in_order(backend: Any, devices: Any) -> bool:
  """Returns True if XLA's CPU client runs a thread's programs in order, on all of JAX's devices.

  A program waits for its thread's previous one, unless one of them is over several devices (jaxlib
  0.10 to 0.12).
  """
  alone = len(devices) == 1 and backend.local_device_count() == 1
  return alone and backend.platform == _bridge.get_backend().platform


def _signed(module: Any, tokens: int) -> Any:
  """Returns a copy of a lowered program with a sign as its last result.

  The first `tokens` arguments and results, which are tokens, are gone: the copy makes its own.
  """
  context = module.context
  with context, _ir.Location.unknown(context):
    module = _ir.Module.parse(_mlir.module_to_bytecode(module))
    main = next(op for op in module.body.operations if op.attributes["sym_name"].value == "main")
    block = main.regions[0].blocks[0]
    with _ir.InsertionPoint.at_block_begin(block):
      byte: Any = np.zeros(_SIGN.shape, _SIGN.dtype)
      sign = _hlo.constant(_ir.DenseElementsAttr.get(byte))
      for argument in list(block.arguments)[:tokens]:
        argument.replace_all_uses_with(_hlo.create_token())
    for _ in range(tokens):
      block.erase_argument(0)
    end = list(block.operations)[-1]
    with _ir.InsertionPoint(end):
      _func.return_([*list(end.operands)[tokens:], sign])
    end.erase()
    kind = _ir.FunctionType(_ir.TypeAttr(main.attributes["function_type"]).value)
    kind = _ir.FunctionType.get(kind.inputs[tokens:], [*kind.results[tokens:], sign.type])
    main.attributes["function_type"] = _ir.TypeAttr.get(kind)
    for side, more in (("arg_attrs", []), ("res_attrs", [_ir.DictAttr.get({})])):
      if side in main.attributes:
        of_each = [_ir.DictAttr(attributes) for attributes in main.attributes[side]][tokens:]
        of_each = [_renumbered(one, tokens) for one in of_each]
        main.attributes[side] = _ir.ArrayAttr.get([*of_each, *more])
  return module


def _renumbered(attributes: Any, count: int) -> Any:
  """Returns an argument's or result's attributes, after `count` results have been removed.

  A donated argument has the number of the result that uses its memory.
  """
  named = {one.name: one.attr for one in attributes}
  if (alias := named.get("tf.aliasing_output")) is not None:
    value = _ir.IntegerAttr(alias).value - count
    named["tf.aliasing_output"] = _ir.IntegerAttr.get(_ir.IntegerType.get_signless(32), value)
  return _ir.DictAttr.get(named)


def note_loaded(program: Any, out_handler: Any, unordered_effects: Iterable[Any]) -> None:
  """Removes from a loaded program the effects that its sign represents."""
  executable = program.xla_executable
  if _is_signed(out_handler.out_avals):
    waited = not all(map(_is_free, unordered_effects))
    made = _Program(out_handler.out_shardings[-1], waited, _runs_programs(program.keepalive))
    made = _programs.setdefault(id(executable), made)
    # Not weakref.finalize, which runs before JAX's own exit, which looks for holders of devices.
    made.users.add(weakref.ref(program, functools.partial(_unload, id(executable))))
    program.has_unordered_effects = False
  elif all(map(_is_free, unordered_effects)):
    program.has_unordered_effects = False


def _runs_programs(keepalive: Iterable[Any] | None) -> bool:
  return any(isinstance(kept, RunsPrograms) for kept in keepalive or ())


def run(call: Callable[..., Any], program: Any, args: tuple[Any, ...]) -> Any:
  """Executes a program by JAX's `call`, and keeps its sign."""
  if _orders_itself.is_set() and any(map(_is_waited_for, program.ordered_effects)):
    return _in_turn(call, program, args)
  out = call(program, *args)
  if (signed := _programs.get(id(program.xla_executable))) is None:
    if program.has_unordered_effects:
      _part.tell("program dispatched", False)
    return out
  return _callgate.keep_sign(signed.key, (out[:-1], out[-1]), returning=False)


def make_cpp_call(make: Callable[..., Any], executable: Any, params: Any) -> Any:
  """Makes JAX's C++ call of a program; `_Misses` avoids it while it would wait for other calls."""
  _making.signed = id(getattr(executable.unsafe_call, "xla_executable", None)) in _programs
  try:
    return make(executable, params)
  finally:
    _making.signed = False


_making = threading.local()
_is_free: Callable[[Any], bool]  # takes an effect; set once: by `start`
_is_waited_for: Callable[[Any], bool]  # set once: by `start`


def _in_turn(call: Callable[..., Any], program: Any, args: tuple[Any, ...]) -> Any:
  """Runs a program that uses JAX's tokens, and waits for its end.

  It waits before for this thread's programs without tokens.
  """
  wait(threading.get_ident())
  out = call(program, *args)
  _part.tell("program dispatched", False)
  tokens = _dispatch.runtime_tokens.current_tokens
  for effect in program.ordered_effects:
    with contextlib.suppress(Exception):  # the waits for the program raise it
      tokens[effect].block_until_ready()
  return out


class _Misses:
  """A compiled program's calls with operands that JAX's C++ code has not seen.

  During such a call, JAX's C++ code makes other threads' calls with such operands wait until the
  call, and so the program, ends. But a gate of the program may itself wait for those other calls.
  """

  def __init__(self, miss: Callable[..., Any]) -> None:
    self.miss = miss
    self.running: set[object] = set()  # a mark of each; changed in single steps

  def __call__(self, *args: Any, **kwargs: Any) -> Any:
    self.running.add(mark := object())
    try:
      return self.miss(*args, **kwargs)
    finally:
      self.running.discard(mark)

  def calls_apart(self, call: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps JAX's C++ call: while a call with new operands runs, others skip the C++ code."""
    return lambda *args, **kwargs: (
      self.miss(*args, **kwargs)[0] if self.running else call(*args, **kwargs)
    )


# The description of a sign, among a program's results.
_LAST: dict[str, Any] = {
  "global_out_avals": _SIGN,
  "out_shardings": _sharding_impls.UNSPECIFIED,  # pyright: ignore[reportPrivateImportUsage]
  "out_layouts": None,
}


def start(
  is_free: Callable[[Any], bool], is_waited_for: Callable[[Any], bool], enabled: Callable[[], bool]
) -> None:
  """Wraps the functions by which JAX makes programs, once; `execution.start` wraps the rest.

  Args:
    is_free: takes an unordered effect; True if the dispatch may ignore it.
    is_waited_for: takes an effect; True if the program's sign may represent it.
    enabled: called when a program is loaded; False leaves programs with such effects to JAX.
  """
  global _is_free, _is_waited_for
  _is_free, _is_waited_for = is_free, is_waited_for
  registry = _tree_util.dispatch_registry
  _callgate.keep_signs(_signs, _part.listeners("program dispatched"), _prune, _PRUNE_AT)
  registry.register_node(_Signed, lambda signed: ((), None), _callgate.keep_sign)  # pyright: ignore[reportArgumentType]
  one_leaf = registry.flatten(0)[1]
  make_jitted: Any = _jaxlib.pjit
  make_data = _pxla.MeshExecutableFastpathData
  from_hlo, load = _pxla.UnloadedMeshExecutable.from_hlo, _pxla.UnloadedMeshExecutable.load

  def sign(name: str, hlo: Any, *args: Any, **kwargs: Any) -> Any:
    """Gives a program a sign before its compilation, if all its effects are callgate's."""
    unordered, ordered = kwargs["unordered_effects"], kwargs["ordered_effects"]
    effects = [*(effect for effect in unordered if not is_free(effect)), *ordered]
    paced = _runs_programs(kwargs["keepalive"])
    known = (
      (effects or paced)
      and enabled()
      and all(map(is_waited_for, effects))
      and not kwargs.get("mut")
    )
    known = known and kwargs["backend"].platform == "cpu"  # not tested on GPUs yet
    if known and (not ordered or _runs_in_order(kwargs["backend"], kwargs["device_list"])):
      if ordered:
        _orders_itself.set()
      hlo = _signed(hlo, len(ordered))
      kwargs |= {"unordered_effects": [*unordered, *ordered], "ordered_effects": []}
      for key, last in _LAST.items():
        kwargs[key] = (*kwargs[key], last)
    return from_hlo(name, hlo, *args, **kwargs)

  def load_unsigned(self: Any) -> Any:
    made = load(self)
    if _is_signed(made.out_avals):  # only its runner knows about the sign
      for field in ("out_avals", "_out_shardings", "_xla_out_layouts"):
        setattr(made, field, getattr(made, field)[:-1])
    return made

  def fastpath_data(
    xla_executable: Any, out_tree: Any, in_shardings: Any, out_shardings: Any, out_avals: Any,
    out_committed: Any, *args: Any,
  ) -> Any:  # fmt: skip
    if (program := _programs.get(id(xla_executable))) is not None:
      node = (_Signed, program.key)
      out_tree = out_tree.from_node_data_and_children(registry, node, [out_tree, one_leaf])
      out_shardings, out_avals = (*out_shardings, program.sharding), (*out_avals, _SIGN)
      out_committed = (*out_committed, True)
    return make_data(
      xla_executable, out_tree, in_shardings, out_shardings, out_avals, out_committed, *args
    )

  def jitted(name: Any, function: Any, miss: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    signed = function is None and getattr(_making, "signed", False)
    misses = _Misses(miss) if signed else None
    made = make_jitted(name, function, misses or miss, *args, **kwargs)
    _callgate.have_raise(made, jax.errors.JaxRuntimeError)
    return made if misses is None else misses.calls_apart(made)

  _jaxlib.pjit = jitted
  _pxla.MeshExecutableFastpathData = fastpath_data
  _pxla.UnloadedMeshExecutable.from_hlo = staticmethod(sign)
  _pxla.UnloadedMeshExecutable.load = load_unsigned
