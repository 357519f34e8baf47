"""An OpenAI-compatible HTTP server over `runtime.generate.Runtime`; needs the extra `serve`."""
