# SPDX-License-Identifier: Apache-2.0
"""Trains on the rows of a DuckDB query, and writes the losses into the database.

A feed reads one batch of the query's result per step, ahead of the compiled loop. A tap's consumer
inserts each loss. At the end a SQL query summarizes the training.
"""

import duckdb
import jax
import jax.numpy as jnp
import numpy as np

import callgate as cg

ROWS, BATCH, STEPS = 20_000, 200, 300
MAKE = f"""
  create table trips as
  select km, rush, 3.0 + 1.5 * km + 4.0 * rush + 0.3 * (random() - 0.5) as fare
  from (
    select 0.5 + 12 * random() as km, (random() < 0.3)::int as rush, setseed(0.5)
    from range({ROWS})
  )
"""
QUERY = "select km, rush, fare from trips where km < 10 order by hash(km)"


def batches(database):
  """Batches of BATCH rows of the query, again and again."""
  while True:
    columns = database.cursor().execute(QUERY).fetchnumpy()
    rows = np.stack([columns[name] for name in ("km", "rush", "fare")], 1).astype(np.float32)
    for start in range(0, len(rows) - BATCH + 1, BATCH):
      yield rows[start : start + BATCH]


def train(trips):
  """Least squares by stochastic gradient descent; the weights are fare, fare a km, rush hour."""

  def loss(weights, rows):
    guess = weights[0] + rows[:, :2] @ weights[1:]
    return jnp.mean((guess - rows[:, 2]) ** 2)

  def step(weights, i):
    value, slope = jax.value_and_grad(loss)(weights, trips.next())
    cg.tap({"step": i, "loss": value}, "loss")
    return weights - 0.02 * slope, None

  return jax.jit(lambda w: jax.lax.scan(step, w, jnp.arange(STEPS))[0])(jnp.zeros(3))


def main():
  database = duckdb.connect()
  database.execute(MAKE).execute("create table losses (step integer, loss float)")
  writer = database.cursor()

  def insert(record):
    writer.execute("insert into losses values (?, ?)", [int(record["step"]), float(record["loss"])])

  with cg.feed(batches(database)) as trips, cg.channel("loss", to=insert):
    weights = jax.block_until_ready(train(trips))
  question = "select step // 100, count(*), median(loss) from losses group by 1 order by 1"
  for hundred, count, median in database.execute(question).fetchall():
    print(f"steps from {100 * hundred:3}: {count} losses, median {median:.3f}")
  base, by_km, rush = weights
  print(f"fare = {base:.1f} + {by_km:.2f} km + {rush:.1f} in the rush hour")


if __name__ == "__main__":
  main()
