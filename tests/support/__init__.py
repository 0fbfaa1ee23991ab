"""What tests share: data, models, what ranks do, and looks at the machine."""

from pathlib import Path

TESTS = Path(__file__).parent.parent  # what a process that a test starts has in its path
