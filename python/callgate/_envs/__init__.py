# SPDX-License-Identifier: Apache-2.0
"""Gymnasium's environments in compiled programs."""
