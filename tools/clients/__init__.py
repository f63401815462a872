"""Others' clients against `millrace serve`, each in an environment of its own: `python -m tools.clients NAME`."""
