# SPDX-License-Identifier: Apache-2.0
"""Data-parallel training under plain `jit`: each device taps its own loss and gradient.

The images are split over the devices, and the weights are replicated. The taps run on the shards
and move no data between devices. All records of a process go to one stream.

    python examples/sharded_training.py out                       # 4 simulated devices
    python examples/sharded_training.py out 2 127.0.0.1:1234 0    # process 0 of 2, with 2 each
"""

import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax import NamedSharding, P
from sklearn.datasets import load_digits

import callgate as cg

DEVICES, STEPS, RATE = 4, 300, 0.2


def loss(w, x, y):
  return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(x @ w), y[:, None], 1))


@jax.jit
def train(x, y):
  """The weights that fit x[device, row, pixel] to y[device, row]."""

  def step(w, i):
    values, slopes = jax.vmap(jax.value_and_grad(loss), (None, 0, 0))(w, x, y)
    norms = jnp.sqrt(jnp.sum(slopes**2, (1, 2)))  # one of each device, on that device
    cg.tap({"step": i, "loss": values, "norm": norms}, "training", name="shard")
    return w - RATE * slopes.mean(0), None

  return jax.lax.scan(step, jnp.zeros((x.shape[2], 10)), jnp.arange(STEPS))[0]


def data():
  """Digits as [device, row, pixel], and what they show, in the order of the data set."""
  x, y = load_digits(return_X_y=True)
  rows = len(x) // DEVICES
  x = np.hstack([x / 16, np.ones((len(x), 1))], dtype=np.float32)
  return [a[: rows * DEVICES].reshape(DEVICES, rows, *a.shape[1:]) for a in (x, y)]


def report(paths):
  """Prints the records of each device in the merged streams."""
  with cg.open_stream(paths) as stream:
    found = stream.columns("shard")
  for device in np.unique(found["device"]):
    mine = found["device"] == device
    (first, *_, last), process = found["['norm']"][mine].ravel(), found["process"][mine][0]
    print(f"process {process}, device {device}: gradient {first:.4f} to {last:.4f}")


def main(folder, count, address, index):
  folder.mkdir(parents=True, exist_ok=True)
  jax.config.update("jax_platforms", "cpu")
  jax.config.update("jax_num_cpu_devices", DEVICES // count)
  if count > 1:
    jax.distributed.initialize(address, count, index)
  (folder / f"run-{index}.cgs").unlink(missing_ok=True)  # a sink would append
  split = NamedSharding(jax.make_mesh((DEVICES,), ("rows",)), P("rows"))
  x, y = data()
  parts = [jax.make_array_from_callback(a.shape, split, a.__getitem__) for a in (x, y)]
  with cg.channel("training", to=cg.sinks.Stream(folder / "run-{process}.cgs")):
    w = train(*parts)
    cg.barrier(all_processes=True)  # all is written; raises others' errors
  if index == 0:
    report([folder / f"run-{process}.cgs" for process in range(count)])
    right = (x @ np.asarray(w.addressable_data(0))).argmax(2) == y
    print(f"{right.mean():.4f} of the images are read right")


if __name__ == "__main__":
  path, count, address, index = [*sys.argv[1:], *("out", 1, "", 0)[len(sys.argv) - 1 :]]
  main(pathlib.Path(path), int(count), address, int(index))
