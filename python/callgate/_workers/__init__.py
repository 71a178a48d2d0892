# SPDX-License-Identifier: Apache-2.0
"""Gates that run in other processes: workers, executors, and objects that live there."""
