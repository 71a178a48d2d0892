# SPDX-License-Identifier: Apache-2.0
"""The stream to which the tests of `host_callback_2023` print."""

from __future__ import annotations

import functools

import pytest
from hcb_streams import Stream

from callgate.compat import host_callback_2023 as hcb


@pytest.fixture
def stream():
  return Stream()


@pytest.fixture
def show(stream):
  return functools.partial(hcb.id_print, output_stream=stream)
