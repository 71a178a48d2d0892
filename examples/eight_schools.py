# SPDX-License-Identifier: Apache-2.0
"""Samples the eight schools model with NumPyro, with a progress bar in NumPyro's compiled loops.

The loops are NumPyro's and can't be changed: `cg.bars` gives each long loop that is traced in its
block a bar, here one for all chains. The samples are the same as without bars. Data: effects of
coaching on test scores in eight schools (Rubin, 1981).
"""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

import callgate as cg

EFFECT = np.array([28.0, 8, -3, 7, -1, 1, 18, 12], np.float32)
ERROR = np.array([15.0, 10, 16, 11, 9, 11, 10, 18], np.float32)
WARMUP, SAMPLES, CHAINS = 500, 1000, 4


def schools():
  mean = numpyro.sample("mean", dist.Normal(0, 5))
  spread = numpyro.sample("spread", dist.HalfCauchy(5))
  with numpyro.plate("school", len(EFFECT)):
    offset = numpyro.sample("offset", dist.Normal(0, 1))
    effect = numpyro.deterministic("effect", mean + spread * offset)
    numpyro.sample("seen", dist.Normal(effect, ERROR), obs=EFFECT)


def sample():
  kernel = numpyro.infer.NUTS(schools, target_accept_prob=0.95)
  chains = numpyro.infer.MCMC(
    kernel, num_warmup=WARMUP, num_samples=SAMPLES, num_chains=CHAINS,
    chain_method="vectorized", progress_bar=False,
  )  # fmt: skip
  chains.run(jax.random.key(0))
  return chains.get_samples(group_by_chain=True)


def main():
  with cg.bars(min_steps=100):
    found = sample()
  cg.barrier()
  again = sample()
  same = all(jnp.array_equal(found[name], again[name]) for name in found)
  print(f"{CHAINS} chains of {SAMPLES} samples; without bars they are the same: {same}")
  r_hat = numpyro.diagnostics.gelman_rubin(np.asarray(found["mean"]))
  print(f"mean effect {found['mean'].mean():.1f} points, R-hat {r_hat:.2f}")
  means = found["effect"].mean((0, 1))
  bounds = np.percentile(found["effect"], [5, 95], (0, 1))
  for name, seen, mean, low, high in zip("ABCDEFGH", EFFECT, means, *bounds, strict=True):
    print(f"{name}: {seen:5.1f} seen, {mean:4.1f} ({low:5.1f} to {high:4.1f})")


if __name__ == "__main__":
  main()
