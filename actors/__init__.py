"""The actor role of asyncrl (import as `asyncrl.actors`)."""
