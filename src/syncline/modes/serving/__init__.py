"""Parameter servers: where parameters live that workers push gradients to and pull from."""
