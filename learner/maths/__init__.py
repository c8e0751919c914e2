"""Losses, corrections, advantages: pure functions of flat packed tensors. No model, no ranks."""
