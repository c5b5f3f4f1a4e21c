"""`python -m gyre_rl`: the `gyre` command without its script."""

from gyre_rl.cli import main

if __name__ == "__main__":
    main()
