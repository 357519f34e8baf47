"""New keys and values into the draft caches, in place."""
