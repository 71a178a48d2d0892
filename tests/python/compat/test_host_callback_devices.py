# SPDX-License-Identifier: Apache-2.0
"""Both forms of `host_callback` on four devices."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from callgate.compat import host_callback as old
from callgate.compat import host_callback_2023 as hcb

pytestmark = pytest.mark.skipif(jax.device_count() < 4, reason="needs 4 devices")
DEVICES = jax.devices()[:4]


@pytest.fixture
def x() -> jax.Array:
  """Eight numbers, two on each device."""
  return jax.device_put(jnp.arange(8.0), NamedSharding(Mesh(np.array(DEVICES), ("i",)), P("i")))


def on_each(f: Any, x: jax.Array) -> list[Any]:
  """Runs of a function of a device's numbers by pmap and by shard_map."""
  shard = jax.shard_map(f, mesh=Mesh(np.array(DEVICES), ("i",)), in_specs=P("i"), out_specs=P("i"))
  return [lambda: jax.pmap(f)(jnp.arange(8.0).reshape(4, 2)), lambda: jax.jit(shard)(x)]


def test_each_device_sends_its_own_in_2020(x: jax.Array) -> None:
  seen: list[Any] = []
  f = lambda x: old.id_tap(lambda v: seen.append(np.ravel(v).tolist()), x * 2)
  for run in on_each(f, x):
    with old.outfeed_receiver():
      run()
    assert sorted(seen) == [[0, 2], [4, 6], [8, 10], [12, 14]]
    seen.clear()
  with old.outfeed_receiver():
    jax.jit(f)(x)  # partitioned: the whole, once
  assert seen == [(2 * np.arange(8.0)).tolist()]


def test_a_receiver_is_for_its_devices_in_2020() -> None:
  seen: list[float] = []
  f = jax.jit(lambda x: old.id_tap(lambda v: seen.append(float(v)), x))
  one = jax.device_put(1.0, DEVICES[1])
  with old.outfeed_receiver(devices=DEVICES[:1]):
    f(0.0)
    with pytest.raises(ValueError, match=r"outfeed_receiver is not started.*cpu:1"):
      f(one)
    with pytest.raises(ValueError, match="cpu:0"), old.outfeed_receiver():
      pass
    with old.outfeed_receiver(devices=DEVICES[1:]):  # the failed one took none
      f(one)
  with pytest.raises(ValueError, match="not started"):
    jax.pmap(f)(jnp.arange(4.0))
  assert seen == [0.0, 1.0]


def test_exceptions_belong_to_the_receiver_of_their_device_in_2020() -> None:
  def bad(value: Any) -> None:
    raise ValueError(f"value {value}")

  f = jax.jit(lambda x: old.id_tap(bad, x))
  with (
    old.outfeed_receiver(devices=DEVICES[:1]),
    pytest.raises(old.TapFunctionException, match=r"value 7\.0") as caught,
    old.outfeed_receiver(devices=DEVICES[1:2]),
  ):
    assert f(jax.device_put(7.0, DEVICES[1])) == 7.0
  assert len(caught.value.exceptions) == 1


def test_each_device_sends_its_own_in_order_in_2023(x: jax.Array) -> None:
  seen: list[Any] = []

  def f(x: Any) -> Any:
    for i in range(5):
      note = lambda v, t, *, device, i=i: seen.append((device.id, i, v.tolist()))
      hcb.id_tap(note, x, tap_with_device=True)
    return x

  for run in on_each(f, x):
    run()
    hcb.barrier_wait()
    assert len(seen) == 20
    for device in range(4):
      mine = [(i, v) for d, i, v in seen if d == device]
      assert mine == [(i, [2.0 * device, 2 * device + 1]) for i in range(5)]
    seen.clear()


def test_a_partitioned_array_comes_whole_once_from_the_named_device_in_2023(x: jax.Array) -> None:
  seen: list[Any] = []

  def f(x: Any) -> Any:
    for i in range(3):
      x = hcb.id_tap(
        lambda v, t, *, device: seen.append((device, v.tolist())),
        x + 1,
        tap_with_device=True,
        device_index=i,
      )
    body = lambda i, x: hcb.id_tap(lambda v, t: seen.append(v[0]), x + 1)
    return jax.lax.fori_loop(0, 2, body, x)

  np.testing.assert_array_equal(jax.jit(f)(x), np.arange(8.0) + 5)
  hcb.barrier_wait()
  assert seen == [(DEVICES[i], (np.arange(8.0) + i + 1).tolist()) for i in range(3)] + [4.0, 5.0]


def test_calls_on_devices_in_2023(x: jax.Array) -> None:
  seen: list[Any] = []

  def host(x: Any, *, device: Any) -> Any:
    seen.append((device, x.shape))
    return 2 * x

  def f(x: Any, index: int = 0) -> Any:
    return hcb.call(host, x, result_shape=x, call_with_device=True, device_index=index)

  np.testing.assert_array_equal(jax.jit(lambda x: f(x, 2))(x), 2 * np.arange(8.0))
  assert seen == [(DEVICES[2], (8,))]
  seen.clear()
  for run in on_each(f, x):
    np.testing.assert_array_equal(np.ravel(run()), 2 * np.arange(8.0))
    assert sorted(seen, key=lambda s: s[0].id) == [(d, (2,)) for d in DEVICES]
    seen.clear()


def test_a_callback_runs_programs_on_another_device_to_second_order_in_2023() -> None:
  def elsewhere(function: Any, arg: Any) -> Any:
    def host(arg: Any) -> Any:
      return jax.jit(function)(jax.device_put(arg, DEVICES[1]))

    @jax.custom_vjp
    def called(arg: Any) -> Any:
      return hcb.call(host, arg, result_shape=jax.eval_shape(function, arg))

    def backward(arg: Any, ct: Any) -> Any:
      pull = lambda pair: jax.vjp(function, pair[0])[1](pair[1])[0]
      return (elsewhere(pull, (arg, ct)),)

    called.defvjp(lambda arg: (called(arg), arg), backward)
    return called(arg)

  f = lambda x: 2.0 * elsewhere(lambda x: x**3, x)
  for jit in (jax.jit, lambda f: f):
    assert jit(f)(5.0) == 250.0
    assert jit(jax.grad(f))(5.0) == 150.0
    assert jit(jax.grad(jax.grad(f)))(5.0) == 60.0
  out = jax.jit(lambda x: elsewhere(lambda d: [jnp.sin(d["a"]), d["b"]], x))({"a": 3.0, "b": 4.0})
  np.testing.assert_allclose(out, [np.sin(3.0), 4.0], rtol=1e-6)
