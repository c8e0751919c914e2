"""Weights by relay: one receiver a machine, whose engines load from its memory when they like."""
