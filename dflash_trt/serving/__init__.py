"""Serving: an OpenAI-compatible server, and a model repository for Triton Inference Server."""
