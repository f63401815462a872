"""What an engine is made of, chosen by what it costs in answers: the whole model's precision so far."""
