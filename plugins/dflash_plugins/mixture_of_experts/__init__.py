"""The experts of gpt-oss for batches: tokens grouped by expert, weights read as they are stored."""
