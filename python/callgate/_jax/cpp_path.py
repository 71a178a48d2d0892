# SPDX-License-Identifier: Apache-2.0
"""Programs with effects on JAX's C++ dispatch path (docs/design.md, Dispatch).

JAX leaves that path when an executable reports an effect, for two reasons (0.10 to 0.12; there is
no public API). Its C++ code keeps no token of a program for `jax.effects_barrier` to wait for: here
the smallest result stands for its program. And it hands ordered effects' tokens from program to
program: here a program makes its own, where XLA runs a device's programs in order.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
from jax._src import dispatch as _dispatch
from jax._src import tree_util as _tree_util
from jax._src import xla_bridge as _bridge
from jax._src.interpreters import mlir as _mlir
from jax._src.interpreters import pxla as _pxla
from jax._src.lib import _jax as _jaxlib  # pyright: ignore[reportPrivateImportUsage, reportPrivateUsage]
from jax._src.lib.mlir import ir as _ir  # pyright: ignore[reportPrivateImportUsage]
from jax._src.lib.mlir.dialects import func as _func
from jax._src.lib.mlir.dialects import hlo as _hlo

from callgate import _callgate

# Of a result that is kept until the program's next call, or until somebody waits.
MOST_BYTES = 4096

# By (thread, program): the last call's result.
_results: dict[tuple[int, int], Any] = {}
_prune_at = 1024  # results, after which those that are ready are let go
_numbers = itertools.count()
# By the id of an XLA executable: its program's number, and how many ExecuteReplicated run it.
_programs: dict[int, list[int]] = {}
_orders_itself = threading.Event()  # set once a program makes tokens of its own


class _Kept:
  """In the output tree of a program, around the result that stands for it."""


def _keep(program: int, children: Iterable[Any]) -> Any:
  (result,) = children
  _results[threading.get_ident(), program] = result
  if len(_results) > _prune_at:
    _prune()
  return result


def _prune() -> None:
  global _prune_at
  for key, result in list(_results.items()):
    with contextlib.suppress(Exception):  # a failed one stays for the barrier
      if result.is_deleted() or result.is_ready():
        result.block_until_ready()
        _forget(key, result)
  _prune_at = max(1024, 2 * len(_results))


def _forget(key: tuple[int, int], result: Any) -> None:
  if _results.get(key) is result:
    _results.pop(key, None)


def pending() -> bool:
  """True if a program's result may be waited for."""
  return bool(_results)


def forget() -> None:
  """Has nobody wait for what runs now."""
  _results.clear()


def after_fork() -> None:
  """In the child nothing runs. Its results stay: XLA's locks may be held by threads not there."""
  _of_parent.append(dict(_results))
  _results.clear()


_of_parent: list[dict[tuple[int, int], Any]] = []


def wait(thread: int | None = None) -> None:
  """Waits for the programs of a thread, or of all, that took the C++ path.

  What they failed with is left to `take_failure` in the thread that dispatched them.
  """
  alive = {one.ident for one in threading.enumerate()} if _results else ()
  for key, result in list(_results.items()):
    if thread is None or key[0] == thread:
      try:
        result.block_until_ready()
      except Exception:  # noqa: BLE001 - whatever the program failed with
        if key[0] in alive and not _deleted(result):
          continue
      _forget(key, result)


def take_failure() -> BaseException | None:
  """Waits for this thread's programs; returns what the first of those that failed did so with."""
  failure: BaseException | None = None
  thread = threading.get_ident()
  for key, result in [item for item in list(_results.items()) if item[0][0] == thread]:
    try:
      result.block_until_ready()
    except Exception as error:  # noqa: BLE001 - whatever the program failed with is passed on
      failure = failure or (None if _deleted(result) else error)
    _forget(key, result)
  return failure


def _deleted(result: Any) -> bool:
  """True if it was donated: to a program that runs after this one, on the same device."""
  return bool(result.is_deleted())


def _unload(executable: int) -> None:
  _programs[executable][1] -= 1
  if not _programs[executable][1]:
    del _programs[executable]


def _smallest(avals: Iterable[Any]) -> int | None:
  """Which result is the smallest, if it is small enough to be kept; an empty one tells nothing."""
  plain = [(aval, i) for i, aval in enumerate(avals) if isinstance(aval.dtype, np.dtype)]
  sizes = [(aval.size * aval.dtype.itemsize, i) for aval, i in plain]
  size, index = min((one for one in sizes if one[0]), default=(MOST_BYTES + 1, 0))
  return index if size <= MOST_BYTES else None


def _with_kept(tree: Any, index: int, program: int) -> Any:
  """An output tree that calls `_keep` with its leaf of that index whenever it is unflattened."""
  registry, make = _tree_util.dispatch_registry, tree.from_node_data_and_children
  if tree.node_data() is None and tree.num_leaves == 1:
    return make(registry, (_Kept, program), [tree])
  children = list(tree.children())
  for i, child in enumerate(children):
    if index < child.num_leaves:
      children[i] = _with_kept(child, index, program)
      break
    index -= child.num_leaves
  return make(registry, tree.node_data(), children)


def _runs_in_order(backend: Any, devices: Any) -> bool:
  """True if XLA runs all that a thread dispatches in that order, on all devices that JAX may use.

  On a GPU by its stream. The CPU client has a program wait for the one that its thread dispatched
  before, unless either is over several devices (jaxlib 0.10 to 0.12).
  """
  alone = len(devices) == 1 and backend.local_device_count() == 1
  known = backend.platform in ("cpu", "gpu", "cuda")
  return alone and known and backend.platform == _bridge.get_backend().platform


def _with_own_tokens(module: Any, count: int) -> Any:
  """A copy of a lowered program that makes its first `count` arguments, all tokens, itself.

  It doesn't return the first `count` results, which are tokens too.
  """
  context = module.context
  with context, _ir.Location.unknown(context):
    module = _ir.Module.parse(_mlir.module_to_bytecode(module))
    main = next(op for op in module.body.operations if op.attributes["sym_name"].value == "main")
    block = main.regions[0].blocks[0]
    with _ir.InsertionPoint.at_block_begin(block):
      for argument in list(block.arguments)[:count]:
        argument.replace_all_uses_with(_hlo.create_token())
    for _ in range(count):
      block.erase_argument(0)
    end = list(block.operations)[-1]
    with _ir.InsertionPoint(end):
      _func.return_(list(end.operands)[count:])
    end.erase()
    kind = _ir.FunctionType(_ir.TypeAttr(main.attributes["function_type"]).value)
    kind = _ir.FunctionType.get(kind.inputs[count:], kind.results[count:])
    main.attributes["function_type"] = _ir.TypeAttr.get(kind)
    for side in ("arg_attrs", "res_attrs"):
      if side in main.attributes:
        of_each = [_ir.DictAttr(attributes) for attributes in main.attributes[side]][count:]
        main.attributes[side] = _ir.ArrayAttr.get([_renumbered(one, count) for one in of_each])
  return module


def _renumbered(attributes: Any, count: int) -> Any:
  """An argument's attributes, of which a donated one names the result that takes its place."""
  named = {one.name: one.attr for one in attributes}
  if (alias := named.get("tf.aliasing_output")) is not None:
    value = _ir.IntegerAttr(alias).value - count
    named["tf.aliasing_output"] = _ir.IntegerAttr.get(_ir.IntegerType.get_signless(32), value)
  return _ir.DictAttr.get(named)


def _in_turn(call: Callable[..., Any], program: Any, args: tuple[Any, ...]) -> Any:
  """Calls a program with JAX's tokens after those that order themselves, and before the next."""
  wait(threading.get_ident())
  out = call(program, *args)
  tokens = _dispatch.runtime_tokens.current_tokens
  for effect in program.ordered_effects:
    with contextlib.suppress(Exception):  # left to those who wait for the program
      tokens[effect].block_until_ready()
  return out


def start(
  is_free: Callable[[Any], bool], is_waited_for: Callable[[Any], bool], enabled: Callable[[], bool]
) -> None:
  """Patches JAX's dispatch, once for the process; `enabled` is asked when a program is loaded.

  Args:
    is_free: of an unordered effect: the dispatch need never know.
    is_waited_for: of an effect: a result of the program may stand for it.
    enabled: false to leave programs with effects that are waited for to JAX.
  """
  _tree_util.dispatch_registry.register_node(_Kept, lambda kept: ((), None), _keep)  # pyright: ignore[reportArgumentType]
  init, call = _pxla.ExecuteReplicated.__init__, _pxla.ExecuteReplicated.__call__
  make_jitted: Any = _jaxlib.pjit
  make_data = _pxla.MeshExecutableFastpathData
  from_hlo = _pxla.UnloadedMeshExecutable.from_hlo

  def can_hide(effects: Iterable[Any]) -> bool:
    return enabled() and all(map(is_waited_for, effects))

  def __init__(
    self: Any, xla_executable: Any, name: Any, backend: Any, in_handler: Any, out_handler: Any,
    unordered_effects: list[Any], ordered_effects: list[Any], *args: Any, **kwargs: Any,
  ) -> None:  # fmt: skip
    given = unordered_effects, ordered_effects
    init(self, xla_executable, name, backend, in_handler, out_handler, *given, *args, **kwargs)
    if ordered_effects:
      return
    effects = [effect for effect in unordered_effects if not is_free(effect)]
    if not effects:
      self.has_unordered_effects = False
    elif can_hide(effects) and _smallest(out_handler.out_avals) is not None:
      self.has_unordered_effects = False
      _programs.setdefault(id(xla_executable), [next(_numbers), 0])[1] += 1
      weakref.finalize(self, _unload, id(xla_executable)).atexit = False

  def __call__(self: Any, *args: Any) -> Any:
    if _orders_itself.is_set() and any(map(is_waited_for, self.ordered_effects)):
      return _in_turn(call, self, args)
    out = call(self, *args)
    if (program := _programs.get(id(self.xla_executable))) is not None:
      index = _smallest(result.aval for result in out)
      if index is not None:
        _keep(program[0], (out[index],))
    return out

  def fastpath_data(xla_executable: Any, out_tree: Any, *args: Any) -> Any:
    data = make_data(xla_executable, out_tree, *args)
    if (program := _programs.get(id(xla_executable))) is None:
      return data
    if (index := _smallest(data.out_avals)) is None:
      return None
    return data._replace(out_pytree_def=_with_kept(out_tree, index, program[0]))

  def ordered_from_hlo(name: str, hlo: Any, *args: Any, **kwargs: Any) -> Any:
    ordered = kwargs["ordered_effects"]
    if ordered and can_hide(ordered) and _runs_in_order(kwargs["backend"], kwargs["device_list"]):
      hlo = _with_own_tokens(hlo, len(ordered))
      kwargs["unordered_effects"] = [*kwargs["unordered_effects"], *ordered]
      kwargs["ordered_effects"] = []
      _orders_itself.set()
    return from_hlo(name, hlo, *args, **kwargs)

  def with_runtime_errors(*args: Any, **kwargs: Any) -> Any:
    function = make_jitted(*args, **kwargs)
    _callgate.have_raise(function, jax.errors.JaxRuntimeError)
    return function

  _jaxlib.pjit = with_runtime_errors
  _pxla.ExecuteReplicated.__init__ = __init__
  _pxla.ExecuteReplicated.__call__ = __call__  # pyright: ignore[reportAttributeAccessIssue]
  _pxla.MeshExecutableFastpathData = fastpath_data
  _pxla.UnloadedMeshExecutable.from_hlo = staticmethod(ordered_from_hlo)
