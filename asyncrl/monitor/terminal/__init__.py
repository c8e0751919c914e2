"""A run in the terminal: `asyncrl monitor`."""
