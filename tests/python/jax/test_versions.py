# SPDX-License-Identifier: Apache-2.0
"""A JAX that is out of callgate's range, and lacks a private part that callgate uses."""

from __future__ import annotations

import re
from importlib import metadata

import pytest
from interpreters import printed_by

from callgate._jax import versions

FIRST, BEYOND = (".".join(map(str, version)) for version in (versions.FIRST, versions.BEYOND))


@pytest.mark.parametrize(
  ("module", "name"),
  [("source_info_util", "register_exclusion"), ("ad_checkpoint", "remat_p")],
  ids=["at the import", "at the first use"],
)
def test_a_jax_beyond_the_range_is_named_where_a_private_name_is_missing(module, name) -> None:
  code = f"""
    import jax
    from jax._src import {module}
    del {module}.{name}
    jax.__version__, jax.__version_info__ = "99.1", (99, 1)
    try:
      import callgate
      callgate.gate
    except ImportError as error:
      print(error)
  """
  assert re.fullmatch(
    rf"callgate needs JAX from {FIRST} to below {BEYOND}, .* got JAX 99.1, which lacks one of them "
    rf"\(.*{name}.*\): run pip install 'jax>={FIRST},<{BEYOND}'",
    printed_by(code, new=True).strip(),
  )


def test_within_the_range_the_error_stays() -> None:
  with pytest.raises(AttributeError, match="gone"), versions.needs_its_versions():
    raise AttributeError("gone")


def test_the_range_of_jax_is_that_of_the_package() -> None:
  required = next(line for line in metadata.requires("callgate") or () if line.startswith("jax<"))
  assert required == f"jax<{BEYOND},>={FIRST}"
