# SPDX-License-Identifier: Apache-2.0
"""Programs for CUDA: targets, attributes, effects, aliases; and exports for two platforms.

Nothing here runs on a GPU, fake or real: programs are lowered for it.
"""

from __future__ import annotations

import re
from typing import Any

import held_calls
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreters import printed_by
from jax import export
from jax.experimental import io_callback

import callgate as cg
from callgate._core.public import core
from callgate._runtime import targets
from callgate.compat.buffer_callback import buffer_callback

CUDA = ("cuda",)
BOTH = ("cpu", "cuda")


def same(x: Any) -> Any:
  return x


def text_of(function: Any, *arguments: Any, platforms: tuple[str, ...] = CUDA) -> str:
  return jax.jit(function).trace(*arguments).lower(lowering_platforms=platforms).as_text()


def targets_of(text: str) -> list[str]:
  return re.findall(r"custom_call @\"?([\w.]+)", text)


def x3() -> np.ndarray[Any, Any]:
  return np.arange(3, dtype=np.float32)


@pytest.mark.parametrize("arrays", ["numpy", "buffer", "jax", "torch", "cupy", "numba"])
def test_every_kind_of_gate_is_a_call_by_name(arrays: Any) -> None:
  gate = cg.gate(same, out=same, arrays=arrays, name=f"lowered-{arrays}")
  text = text_of(gate, x3())
  assert targets_of(text) == ["callgate.gate"]
  assert f'name = "lowered-{arrays}"' in text
  assert not re.search(r"\b\d{12,}\b", text)  # no pointer


def test_cuda_and_cpu_programs_hold_the_same_call() -> None:
  gate = cg.gate(same, out=same)
  on_cpu, on_cuda = (text_of(gate, x3(), platforms=(p,)) for p in BOTH)
  call = lambda text: next(line for line in text.splitlines() if "custom_call" in line)
  assert call(on_cpu) == call(on_cuda)


def test_a_gate_that_may_be_recorded_has_a_target_of_its_own_on_cuda_alone() -> None:
  gate = cg.gate(
    lambda out, x: None, out=same, arrays="buffer", style="inplace", command_buffer=True
  )
  assert targets_of(text_of(gate, x3())) == ["callgate.gate.graph"]
  assert targets_of(text_of(gate, x3(), platforms=("cpu",))) == ["callgate.gate"]
  assert targets_of(text_of(gate, x3(), platforms=BOTH)) == ["callgate.gate"]


def test_effects_aliases_and_lanes_are_held_as_on_the_cpu() -> None:
  gate = cg.gate(lambda out, x: None, out=same, effect="io", style="inplace", aliases={0: 0})
  text = text_of(jax.vmap(gate), np.ones((2, 3), np.float32))
  assert "has_side_effect = true" in text
  assert "output_operand_alias" in text
  (call,) = held_calls.calls(jax.vmap(gate), np.ones((2, 3), np.float32), platform="cuda")
  assert call["batch"] == {"sizes": [2], "masks": [1]}


def test_ordered_gates_take_and_give_tokens() -> None:
  gate = cg.gate(lambda x: None, out=(), effect="ordered")

  def program(x: Any) -> Any:
    gate(x)
    gate(x + 1)
    return x

  for platforms in (CUDA, BOTH):
    text = text_of(program, x3(), platforms=platforms)
    assert targets_of(text) == ["callgate.gate"] * 2
    assert text.count("!stablehlo.token") >= 4


def test_taps_checks_prints_and_feeds_are_lowered_for_cuda() -> None:
  with cg.feed(iter([np.float32(1)] * 3)) as feed, cg.channel("lowered", to=lambda *_: None):

    def program(x: Any) -> Any:
      cg.tap(x, "lowered")
      cg.check(x[0] >= 0, "x >= 0")
      cg.print("{}", x)
      return x + feed.next()

    found = targets_of(text_of(program, x3()))
  assert sorted(found) == ["callgate.gate"] * 2 + ["callgate.tap"] * 2


def test_taps_of_large_arrays_stay_out_of_cuda_graphs() -> None:
  def target(x: Any) -> str:
    return targets_of(text_of(lambda x: cg.tap({"x": x, "n": x[0]}, print)["x"], x))[0]

  assert target(jax.ShapeDtypeStruct((16_383,), jnp.float32)) == "callgate.tap"
  assert target(jax.ShapeDtypeStruct((16_384,), jnp.float32)) == "callgate.gate"
  assert target(jax.ShapeDtypeStruct((16_384,), jnp.float16)) == "callgate.tap"


def test_progress_is_lowered_for_cuda() -> None:
  def program(x: Any) -> Any:
    return cg.fori_loop(0, 5, lambda _, y: y + 1, x, progress=True)

  found = targets_of(text_of(program, x3()))
  assert found
  assert set(found) == {"callgate.gate"}


def test_platforms_without_the_runtime_get_jaxs_own_callbacks() -> None:
  ordered = cg.gate(lambda x: None, out=(), effect="ordered")
  with pytest.raises(cg.GateDefinitionError, match=r"one CPU or CUDA device"):
    text_of(lambda x: (ordered(x), x)[1], x3(), platforms=("tpu",))


def test_export_for_two_platforms_runs_on_the_one_there_is() -> None:
  gate = cg.gate(lambda x: np.asarray(x) + 1, out=same, name="exported for two")
  checks = cg.export_checks()
  exported = export.export(jax.jit(lambda x: gate(x) * 2), platforms=BOTH, disabled_checks=checks)(
    jax.ShapeDtypeStruct((3,), jnp.float32)
  )
  assert exported.platforms == BOTH
  again = export.deserialize(exported.serialize())
  np.testing.assert_array_equal(again.call(x3()), (x3() + 1) * 2)


@pytest.mark.parametrize("effect", ["pure", "ordered"])
def test_an_operation_that_differs_by_platform_is_chosen_when_the_program_runs(
  effect: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
  gate = cg.gate(lambda out, x: None, out=same, arrays="buffer", style="inplace", effect=effect)
  monkeypatch.setattr(core(gate), "traits", core(gate).traits.but(same_on_all_platforms=False))
  monkeypatch.setattr(core(gate), "command_buffer", True)
  text = text_of(lambda x: gate(gate(x)), x3(), platforms=BOTH)
  assert targets_of(text) == ["callgate.gate", "callgate.gate.graph"] * 2
  assert targets_of(text_of(gate, x3(), platforms=("cpu",))) == ["callgate.gate"]


def test_install_runs_jaxs_callbacks_on_callgate_for_cuda() -> None:
  def program(x: Any) -> Any:
    jax.debug.print("{}", x)
    io_callback(lambda x: None, None, x)
    return jax.pure_callback(np.sin, x, x)

  cg.install()
  try:
    found = targets_of(text_of(program, x3()))
  finally:
    cg.uninstall()
  assert sorted(found) == ["callgate.gate", "callgate.gate", "callgate.tap"]


@pytest.mark.parametrize(("recorded", "target"), [(False, "gate"), (True, "gate.graph")])
def test_buffer_callbacks_are_gates_on_cuda(recorded: bool, target: str) -> None:
  call = buffer_callback(
    lambda ctx, out, x: None,
    jax.ShapeDtypeStruct((3,), jnp.float32),
    command_buffer_compatible=recorded,
  )
  assert targets_of(text_of(call, x3())) == [f"callgate.{target}"]
  assert targets_of(text_of(call, x3(), platforms=("cpu",))) == ["callgate.gate"]


def test_import_starts_no_backend_and_loads_no_driver() -> None:
  code = """
import sys
import callgate as cg, jax, numpy as np
from jax.extend import backend
gate = cg.gate(lambda x: x, out=lambda x: x, arrays="cupy")
with open("/proc/self/maps") as maps:
  loaded = maps.read()
print("libcuda" in loaded, "cupy" in sys.modules, "numba" in sys.modules, "torch" in sys.modules)
print(jax._src.xla_bridge.backends_are_initialized())
"""
  assert printed_by(code, new=True) == "False False False False\nFalse\n"


def test_every_target_is_partitioned_too() -> None:
  assert {"callgate.gate.graph", "callgate.gate.graph.partitioned"} <= set(targets.TARGETS)
