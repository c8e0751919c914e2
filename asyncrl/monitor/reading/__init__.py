"""Reading a run: its folder, from afar and while it grows. Never writes, never asks a role."""
