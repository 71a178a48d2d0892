# SPDX-License-Identifier: Apache-2.0
"""callgate's runtime in this process: its targets, options, waiting, beginning and end."""
