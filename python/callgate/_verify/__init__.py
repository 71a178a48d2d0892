# SPDX-License-Identifier: Apache-2.0
"""`verify`: tests one gate or kernel with one call, and returns a report."""
