"""Which dimensions of a call may stay split, and what XLA's partitioner is answered."""
