"""callgate's runtime in this process: its targets, options, waiting, beginning and end."""
