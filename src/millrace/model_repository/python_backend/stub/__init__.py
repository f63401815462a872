"""The side of a `model.py`: what it imports, and what runs it, here or in an interpreter of its own.

Nothing here imports more than NumPy and the standard library, and other parts of this package only by relative names:
the package is loaded under another name by whatever Python a model brings.
"""
