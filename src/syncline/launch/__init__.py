"""Starting ranks: `run` starts local ones for a script, a test or a notebook; `init` joins those of torchrun."""

from syncline.launch.init import init
from syncline.launch.run import run

__all__ = ["init", "run"]
