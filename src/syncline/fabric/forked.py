"""Telling a process from the child it forked.

A forked child has copies of all memory and descriptors but none of the threads, and no rank knows of it: what it said
would be taken for the parent's, and what it waits for never comes. So it is refused, before it takes any lock.
"""

from __future__ import annotations

import os

from syncline.errors import FabricClosed


class Birthplace:
    """The process that something was made in."""

    def __init__(self) -> None:
        self.process = os.getpid()

    def is_here(self) -> bool:
        """Whether this is that process, and not a child that it forked."""
        return os.getpid() == self.process

    def require(self) -> None:
        """Refuse a forked child."""
        if not self.is_here():
            raise FabricClosed(
                f"this belongs to process {self.process}, and process {os.getpid()} is a child forked from it that "
                f"no rank knows of; leave Sync and collectives to the parent, or make them after the fork, not before"
            )
