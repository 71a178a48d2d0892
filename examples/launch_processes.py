# SPDX-License-Identifier: Apache-2.0
"""Trains over several processes on this machine, with one stream for all of them.

The launcher starts processes with two simulated CPU devices each, and `jax.distributed` joins them.
Each device holds rows of scikit-learn's breast-cancer data. One compiled loop averages the devices'
gradients. Taps write a file for each process; the launcher reads all files as one stream.

    python examples/launch_processes.py out
"""

import os
import pathlib
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax import NamedSharding, P
from sklearn.datasets import load_breast_cancer
from sklearn.preprocessing import StandardScaler

import callgate as cg

STEPS, RATE = 200, 0.5


def loss(w, x, y):
  logits = x @ w[:-1] + w[-1]
  return jnp.mean(jax.nn.softplus(logits) - y * logits)


def train(w, x, y):  # on one device, with its own rows
  def step(i, w):
    own = jax.lax.pcast(w, "rows", to="varying")  # or JAX would add the gradients up
    value, slope = jax.value_and_grad(loss)(own, x, y)
    cg.tap({"step": i, "loss": value, "norm": jnp.linalg.norm(slope)}, "run", name="shard")
    return w - RATE * jax.lax.pmean(slope, "rows")

  return cg.fori_loop(0, STEPS, step, w, progress="training")  # process 0 draws the bar


def work(count, port, index):
  jax.distributed.initialize(f"127.0.0.1:{port}", count, index)
  mesh = jax.make_mesh((jax.device_count(),), ("rows",))
  x, y = load_breast_cancer(return_X_y=True)
  rows = len(x) // jax.device_count() * jax.device_count()
  data = StandardScaler().fit_transform(x)[:rows].astype(np.float32), y[:rows].astype(np.float32)
  split = NamedSharding(mesh, P("rows"))
  x, y = (jax.make_array_from_callback(a.shape, split, lambda i, a=a: a[i]) for a in data)
  specs = {"in_specs": (P(), P("rows"), P("rows")), "out_specs": P()}
  with cg.channel("run", to=cg.sinks.Stream("run-{process}.cgs")):
    w = jax.jit(jax.shard_map(train, mesh=mesh, **specs))(jnp.zeros(x.shape[1] + 1), x, y)
    cg.barrier(all_processes=True)  # all is written; raises others' errors
  if index == 0:
    print(f"loss of all rows {loss(np.asarray(w.addressable_data(0)), *data):.5f}")


def launch(folder, count=2):
  folder.mkdir(parents=True, exist_ok=True)
  for old in folder.glob("run-*.cgs"):
    old.unlink()  # a sink appends to an older stream
  with socket.create_server(("127.0.0.1", 0)) as probe:
    port = probe.getsockname()[1]
  flags = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
  command = [sys.executable, os.path.abspath(__file__), "work", *map(str, (count, port))]
  every = [
    subprocess.Popen([*command, str(i)], cwd=folder, env=os.environ | flags) for i in range(count)
  ]
  print("processes ended with", [one.wait() for one in every])
  with cg.open_stream(folder / "run-{process}.cgs") as stream:
    columns = stream.columns("shard")
  process, step, value = (columns[name] for name in ("process", "['step']", "['loss']"))
  for at in range(0, STEPS, 50):
    print(f"step {at:3}  processes {process[step == at]}  loss {value[step == at].mean():.5f}")


if __name__ == "__main__":
  work(*map(int, sys.argv[2:])) if sys.argv[1] == "work" else launch(pathlib.Path(sys.argv[1]))
