# SPDX-License-Identifier: Apache-2.0
"""What steers compiled programs from outside: requests to stop, and knobs."""
