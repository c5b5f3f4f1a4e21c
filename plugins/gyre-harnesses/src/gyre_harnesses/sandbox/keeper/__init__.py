"""What runs in the bare interpreter beside this process: the spawner and the keepers. Standard library only."""
