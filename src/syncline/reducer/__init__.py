"""Gradients of a model: watched as they come, gathered in buckets, and sent along the path."""
