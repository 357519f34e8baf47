"""A model repository for Triton Inference Server: Python backend, decoupled, one model per pair."""
