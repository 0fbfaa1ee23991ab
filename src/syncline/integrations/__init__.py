"""Syncline's parts for those who stay with what they have."""
