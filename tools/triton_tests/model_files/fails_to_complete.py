"""Raises in auto_complete_config."""


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(auto_complete_model_config):
        raise RuntimeError("it cannot be completed")

    def execute(self, requests):
        return []
