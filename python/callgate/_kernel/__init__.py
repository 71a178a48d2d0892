"""Native functions in compiled programs: what all kinds of kernels share."""
