"""Which drafted slots one refinement pass settles."""
