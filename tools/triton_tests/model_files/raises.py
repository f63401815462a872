"""Raises an exception in `execute`."""


class TritonPythonModel:
    def execute(self, requests):
        raise RuntimeError("Intentional Error")
