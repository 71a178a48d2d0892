# SPDX-License-Identifier: Apache-2.0
"""Values that stream out of programs: taps, channels, and the records that consumers get."""
