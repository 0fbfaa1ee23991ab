"""One bucket's way: from its last gradient to the mean over ranks."""
