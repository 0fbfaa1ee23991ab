"""What a rank trains with, as Sync sees it: steps of its optimizers, and its GradScaler."""
