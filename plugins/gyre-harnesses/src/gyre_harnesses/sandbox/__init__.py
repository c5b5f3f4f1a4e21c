"""The sandbox `local`: a folder and processes of its own for every execution, on this host."""
