"""Policy versions on the way from trainer to engine: disk, shared memory, delta, collective."""
