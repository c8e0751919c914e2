"""A run that goes on: which one, from which checkpoint, with which changes; what it is known by."""
