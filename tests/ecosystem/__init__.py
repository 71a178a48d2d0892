# SPDX-License-Identifier: Apache-2.0
"""Programs of other libraries, which `tools/ecosystem.py` runs without and with `install()`."""
