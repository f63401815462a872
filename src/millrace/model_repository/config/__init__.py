"""Configuration of Triton models: config.pbtxt is parsed, completed and checked, and problems are explained."""
