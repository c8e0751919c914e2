"""Looking at recorded samples: choosing them, showing them, writing them elsewhere."""
