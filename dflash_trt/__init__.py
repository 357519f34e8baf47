"""Ahead-of-time compiled DFlash speculative decoding.

See docs/structure.md for the life of a build and of a request.
"""

__version__ = "0.1.0"
