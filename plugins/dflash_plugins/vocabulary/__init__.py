"""Reductions over the vocabulary that several plugins share."""
