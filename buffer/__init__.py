"""The buffer role of asyncrl (import as `asyncrl.buffer`)."""
