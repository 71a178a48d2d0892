# SPDX-License-Identifier: Apache-2.0
"""Finds the best design under an XGBoost model, in one compiled evolution strategy.

The model learns the strength of concrete from simulated experiments. Trees have no gradient, so a
compiled `lax.scan` moves a population by its scores. Each generation calls XGBoost once for all
restarts, because `vmap="whole"` passes all lanes together.
"""

import jax
import jax.numpy as jnp
import numpy as np
import xgboost

import callgate as cg

LOW = np.array([150.0, 120.0, 0.0, 1.0], np.float32)  # cement, water, ash in kg/m3; age in days
HIGH = np.array([500.0, 250.0, 150.0, 90.0], np.float32)
PEOPLE, GENERATIONS, RESTARTS = 64, 40, 4
calls = []


def strength(x):
  """In MPa: Abrams' law, hardening by the logarithm of the age, ash as half a cement."""
  cement, water, ash, age = x.T
  return 96 / 14 ** (water / (cement + 0.5 * ash)) * np.log1p(age) / np.log(29) + 20


def fitted_model():
  random = np.random.default_rng(0)
  x = random.uniform(LOW, HIGH, size=(4000, 4)).astype(np.float32)
  y = strength(x) + random.normal(size=len(x))
  model = xgboost.XGBRegressor(n_estimators=100, max_depth=5, learning_rate=0.1, n_jobs=1)
  return model.fit(x[:3000], y[:3000]), model.score(x[3000:], y[3000:])


MODEL, SCORE = fitted_model()


@cg.gate(out=lambda x: jax.ShapeDtypeStruct(x.shape[:-1], x.dtype), vmap="whole")
def predicted(x):
  calls.append(x.shape)
  return MODEL.predict(x.reshape(-1, 4)).reshape(x.shape[:-1])


def value(x):
  """Predicted strength minus cost, of designs from LOW to HIGH."""
  return predicted(x) - x @ jnp.array([0.10, 0.0, 0.02, 0.05])


def search(key):
  def generation(state, key):
    mean, spread = state
    noise = jax.random.normal(key, (PEOPLE, 4))
    people = jnp.clip(mean + spread * noise, LOW, HIGH)
    values, best = jax.lax.top_k(value(people), PEOPLE // 4)
    return (people[best].mean(0), 0.9 * spread), values[0]

  start = (jax.random.uniform(key, (4,), minval=LOW, maxval=HIGH), (HIGH - LOW) / 3)
  (mean, _), values = jax.lax.scan(generation, start, jax.random.split(key, GENERATIONS))
  return mean, values


def main():
  means, values = jax.jit(jax.vmap(search))(jax.random.split(jax.random.key(0), RESTARTS))
  best = int(jnp.argmax(values[:, -1]))
  print(f"the model explains {100 * SCORE:.1f} % of the variance")
  print(f"value of the best design: {values[best, 0]:.1f} at first, {values[best, -1]:.1f} now")
  names = ("cement", "water", "ash", "age")
  print(", ".join(f"{name} {amount:.0f}" for name, amount in zip(names, means[best], strict=True)))
  print(f"strength {strength(np.asarray(means))[best]:.0f} MPa; {len(calls)} calls of XGBoost")


if __name__ == "__main__":
  main()
