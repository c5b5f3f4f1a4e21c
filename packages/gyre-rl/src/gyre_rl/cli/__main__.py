"""`python -m gyre_rl.cli`: the `gyre` command where its script is not on the path."""

from gyre_rl.cli import main

if __name__ == "__main__":
    main()
