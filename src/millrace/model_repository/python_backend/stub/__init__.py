"""The Python backend stub: the modules that a `model.py` imports and that run it, in this or in another process.

Modules here import only NumPy, the standard library and, by relative names, each other: the package is loaded under
another name by the model's own Python.
"""
