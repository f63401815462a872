"""Evaluates accuracy: perplexity, KL divergence from another engine, and answers to questions."""
