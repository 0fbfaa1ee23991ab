"""Real training to measure with: small models and data that every machine has."""
