"""When a backward pass ends, and whether it ended well.

The autograd engine runs callbacks at the end of a backward pass, and drops them uncalled when it fails. A pass may be
nested in another one (checkpointing with `use_reentrant=True` runs one for each segment, in the middle of a node): the
end of a nested pass is passed on to the pass around it, so what is reported is the end of the outermost one.
"""

from __future__ import annotations

from collections.abc import Callable

from syncline.core.torch_internals import current_graph_task, current_node, queue_callback

current_pass = current_graph_task  # a number for the pass that this thread is in; a nested one has its own


class End:
    """Reports the end of the outermost pass once: in two rounds, or as a failure.

    All callbacks of the first round come before any of the second: when several models are synchronized in one
    pass, each starts its last messages in the first and waits in the second.
    """

    def __init__(self, first: Callable[[], None], second: Callable[[], None], failed: Callable[[], None]) -> None:
        self.first = first
        self.second = second
        self.failed = failed
        self.heard = False
        queue_callback(self)

    def __call__(self) -> None:
        self.heard = True
        node = current_node()
        if node is None:
            self.first()
            queue_callback(self.second)
        else:
            node.register_hook(lambda *_: self.again())

    def again(self) -> None:
        """Wait for the end of the pass around the one that has ended."""
        End(self.first, self.second, self.failed)

    def __del__(self) -> None:
        if not self.heard:
            self.failed()
