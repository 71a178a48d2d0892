# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in Orbax's format, which Orbax itself restores."""

from __future__ import annotations

import collections
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from interpreters import output_of

import callgate as cg
from callgate._checkpoints import orbax

ocp = pytest.importorskip("orbax.checkpoint")
Moments = collections.namedtuple("Moments", ["mu", "nu"])


def put(x: Any, count: int, spec: Any) -> Any:
  mesh = jax.make_mesh((count,), ("d",), devices=jax.devices()[:count])
  return jax.device_put(x, jax.NamedSharding(mesh, spec))


def init(count: int = 4) -> Any:
  """Arrays of several kinds on so many devices, in several kinds of nodes."""
  return {
    "w": put(jnp.arange(16.0).reshape(8, 2), count, jax.P("d")),
    "layers": [
      (put(jnp.zeros(8, jnp.bfloat16), count, jax.P("d")), Moments(jnp.ones(3), jnp.int32(7))),
      {3: put(jnp.zeros((), jnp.complex64), count, jax.P()), 10: jnp.array([True, False])},
    ],
    "a.b/c": jax.random.key(3),
    "none": None,
  }


def body(carry: Any, _: Any) -> Any:
  half, moments = carry["layers"][0]
  layers = [(half + 1, moments), {**carry["layers"][1], 3: carry["layers"][1][3] + 1j}]
  return {**carry, "w": carry["w"] + 1, "layers": layers}, carry["w"].sum()


def run(saves: Any, carry: Any, length: int) -> Any:
  result = jax.jit(lambda c: cg.scan(body, c, length=length, save=saves))(carry)
  cg.barrier()
  return result


def after(steps: int) -> Any:
  carry = init(1)
  for _ in range(steps):
    carry, _ = body(carry, None)
  return jax.tree.map(
    lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x, carry
  )


def assert_same(a: Any, b: Any) -> None:
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
      x = jax.random.key_data(x)
    assert x.dtype == y.dtype
    np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def test_orbax_restores_what_a_loop_has_saved(tmp_path: Path) -> None:
  saves = cg.Checkpoints(tmp_path, every=2, keep=2, format="orbax")
  run(saves, init(), 5)
  assert saves.steps() == (4, 5)
  assert sorted(path.name for path in (tmp_path / "step_0000000005").iterdir()) == [
    "default", "meta.json",
  ]  # fmt: skip
  path = tmp_path / "step_0000000004" / "default"
  found = ocp.PyTreeCheckpointer().restore(path)
  assert found["layers"][0][0].dtype == ml_dtypes.bfloat16
  np.testing.assert_array_equal(found["w"], np.arange(16.0).reshape(8, 2) + 4)
  with ocp.StandardCheckpointer() as one:
    assert_same(one.restore(path, after(0)), after(4))
  options = ocp.CheckpointManagerOptions(
    step_prefix="step", step_format_fixed_length=10, read_only=True
  )
  with ocp.CheckpointManager(tmp_path, options=options) as manager:
    assert list(manager.all_steps()) == [4, 5]
    restored = manager.restore(5, args=ocp.args.StandardRestore(after(0)))
  assert_same(restored, after(5))
  assert_same(saves.load(init()), after(5))
  assert_same(saves.load(init(), 4), after(4))


@pytest.mark.parametrize(("devices", "formats"), [(2, ("orbax", "npz")), (8, ("npz", "orbax"))])
def test_either_format_goes_on_from_either(
  tmp_path: Path, devices: int, formats: tuple[Any, Any]
) -> None:
  run(cg.Checkpoints(tmp_path, every=3, format=formats[0]), init(4), 3)
  carry, ys = run(
    cg.Checkpoints(tmp_path, every=3, resume=True, format=formats[1]), init(devices), 6
  )
  assert_same(carry, after(6))
  assert not ys[:3].any()
  assert ys[3:].all()
  kinds = [(tmp_path / f"step_000000000{step}" / "default").exists() for step in (3, 6)]
  assert kinds == [form == "orbax" for form in formats]


# Orbax reads several at once: the others end after the one that has failed, and their loop.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_damaged_one_is_passed_over(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
  run(cg.Checkpoints(tmp_path, every=2, format="orbax"), init(1), 3)
  newest = tmp_path / "step_0000000003" / "default"
  for path in newest.rglob("*"):  # which of them has the numbers is Orbax's affair
    if path.is_file() and path.parent.name == "d":
      data = bytearray(path.read_bytes())
      data[len(data) // 2] ^= 0xFF
      path.write_bytes(data)
  with pytest.raises(ValueError, match="expected a checkpoint by Orbax"):
    cg.Checkpoints(tmp_path).load(init())
  carry, ys = run(cg.Checkpoints(tmp_path, resume=True), init(1), 4)
  assert_same(carry, after(4))
  np.testing.assert_array_equal(ys != 0, np.arange(4) >= 2)
  assert "step_0000000003 is damaged" in capfd.readouterr().err


def test_a_checkpoint_that_orbax_cannot_write_stays_as_its_parts(
  tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
  def fail(folder: Path, tree: Any) -> None:
    folder.mkdir()
    raise OSError("no such luck")

  monkeypatch.setattr(orbax, "_save", fail)
  saves = cg.Checkpoints(tmp_path, every=2, keep=1, format="orbax")
  with pytest.raises(OSError, match="no such luck"):
    run(saves, init(1), 4)
  assert saves.steps() == (4,)
  assert_same(saves.load(init()), after(4))
  with pytest.raises(cg.GateDefinitionError, match=r"with elements.*got carry: float32\[0\]"):
    run(cg.Checkpoints(tmp_path / "other", format="orbax"), jnp.zeros(0), 1)
  with pytest.raises(cg.GateDefinitionError, match="expected a carry with arrays"):
    jax.jit(lambda: cg.scan(lambda c, x: (c, x), None, np.zeros(3), save=saves))()


def test_without_orbax_the_error_names_the_extra(
  tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
  run(cg.Checkpoints(tmp_path, format="orbax"), init(1), 2)
  monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
  message = r"needs Orbax, which is not installed: pip install 'callgate\[orbax\]'"
  with pytest.raises(cg.GateDefinitionError, match=message):
    cg.Checkpoints(tmp_path, format="orbax")
  with pytest.raises(cg.GateDefinitionError, match=message):
    cg.Checkpoints(tmp_path).load(init())
  with pytest.raises(cg.GateDefinitionError, match=message), cg.errors():
    run(cg.Checkpoints(tmp_path, resume=True), init(1), 3)


def test_a_program_that_just_ends_leaves_checkpoints(tmp_path: Path) -> None:
  """At the end of a process Orbax can't write any more."""
  program = """
    import sys, jax, callgate as cg
    saves = cg.Checkpoints(FOLDER, every=1, keep=9, format="orbax")
    print(jax.jit(lambda x: cg.scan(lambda x, _: (x + 1, None), x, length=3, save=saves)[0])(0))
  """
  assert output_of(program.replace("FOLDER", repr(str(tmp_path)))) == "3\n"
  saves = cg.Checkpoints(tmp_path)
  assert saves.steps() == (1, 2, 3)
  assert [int(saves.load(0, step)) for step in saves.steps()] == [1, 2, 3]
