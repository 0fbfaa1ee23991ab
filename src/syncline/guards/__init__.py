"""What keeps a run safe: gradients that are not finite, replicas that drift apart, and ranks that never arrive."""
