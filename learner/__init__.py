"""The learner role of asyncrl (import as `asyncrl.learner`)."""
