"""Measuring on this machine: answers verified first, inputs rewritten every time, peers in the same run."""
