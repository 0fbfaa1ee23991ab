"""Values that every layer speaks of."""
