"""Shipped configurations (data; `--config NAME` finds them)."""
