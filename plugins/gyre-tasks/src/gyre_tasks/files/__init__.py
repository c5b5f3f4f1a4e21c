"""The `files` family: workspaces with a brief and data files; every result file written right is one milestone."""
