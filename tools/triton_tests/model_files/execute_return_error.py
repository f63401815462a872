"""Returns None first, then a list that has no response in it."""


class TritonPythonModel:
    def initialize(self, args):
        self.calls = 0

    def execute(self, requests):
        self.calls += 1
        return None if self.calls == 1 else [None] * len(requests)
