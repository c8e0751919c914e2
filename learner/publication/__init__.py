"""Versioned weights on their way to the actors."""
