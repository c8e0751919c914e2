"""The model being trained and what is kept beside it: heads, adapters, critic, optimizer."""
