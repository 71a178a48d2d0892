# SPDX-License-Identifier: Apache-2.0
"""How many examples the tests of properties try: a fixed few each time, many random ones in a soak.

`CALLGATE_SOAK=1`, or `--hypothesis-profile=soak`, chooses the many.
"""

from __future__ import annotations

import os
from typing import Any

from hypothesis import settings

# A soak has so many examples for each of a check.
_TIMES = 20

settings.register_profile("check", max_examples=30, derandomize=True, deadline=None, database=None)
settings.register_profile("soak", max_examples=30 * _TIMES, derandomize=False, deadline=None)
settings.load_profile("soak" if os.environ.get("CALLGATE_SOAK") == "1" else "check")


def is_soak() -> bool:
  """True if the tests try all that they can, for hours."""
  return settings.get_current_profile_name() == "soak"


def examples(number: int, **options: Any) -> settings:
  """Settings of a property whose examples are dear: `number` of them, and 20 times that in a soak.

  Args:
    number: of examples that a check tries, always the same ones.
    **options: others of hypothesis.settings.
  """
  return settings(max_examples=number * (_TIMES if is_soak() else 1), **options)
