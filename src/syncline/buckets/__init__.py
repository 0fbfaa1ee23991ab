"""Which gradients travel together, the memory they live in, and when a full bucket leaves."""
