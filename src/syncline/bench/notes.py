"""Notes of what ranks are doing, for the process that started them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, Thread


@contextmanager
def told_by_others(tell: Callable[[str], None]) -> Iterator[Path]:
    """A file of which every new line is told, so that ranks in other processes can tell what they do."""
    done = Event()

    def follow(path: Path) -> None:
        with path.open() as file:
            while not done.wait(0.1):
                for line in file:
                    tell(line.strip())

    with TemporaryDirectory() as folder:
        notes = Path(folder) / "notes"
        notes.touch()
        follower = Thread(target=follow, args=(notes,), daemon=True)
        follower.start()
        try:
            yield notes
        finally:
            done.set()
            follower.join()


def write_note(notes: Path, line: str) -> None:
    """Add a line."""
    with notes.open("a") as file:
        file.write(f"{line}\n")
