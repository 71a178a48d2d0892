"""What both forms of host_callback share."""
