"""Tasks that are folders: a description, the files at the start, and what is hidden."""
