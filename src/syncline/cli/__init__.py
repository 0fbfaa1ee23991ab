"""The `syncline` command: one module per subcommand."""

from syncline.cli.main import main

__all__ = ["main"]
