"""Runs as one HTML file that needs no server and no network, and runs compared."""
