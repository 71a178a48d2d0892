# SPDX-License-Identifier: Apache-2.0
"""A sampler without gradients, of a model whose likelihood NumPy computes."""

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, SA

DATA = np.array([1.0, 2.0, 3.0], np.float32)


def likelihood(mean):
  return np.float32(-0.5 * ((DATA - mean) ** 2).sum())


def model():
  mean = numpyro.sample("mean", dist.Normal(0, 10))
  found = jax.pure_callback(
    likelihood, jax.ShapeDtypeStruct((), np.float32), mean, vmap_method="sequential"
  )
  numpyro.factor("likelihood", found)


def run():
  chain = MCMC(SA(model), num_warmup=50, num_samples=50, progress_bar=False)
  chain.run(jax.random.key(0))
  return {"mean": chain.get_samples()["mean"]}
