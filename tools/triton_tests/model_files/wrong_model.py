"""Uses a name that is not there."""


class TritonPythonModel:
    def execute(self, requests):
        return [missing_function(request) for request in requests]  # noqa: F821 (meant)
