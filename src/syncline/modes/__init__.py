"""When replicas talk."""
