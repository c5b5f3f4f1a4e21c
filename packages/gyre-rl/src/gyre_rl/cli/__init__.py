"""The `gyre` command. Thin: every command is a function of a library module; importing this imports none of them."""


def main() -> None:
    """Entry point of the `gyre` script."""
    from gyre_rl.cli.app import app

    app()
