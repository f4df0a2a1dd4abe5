"""Measuring a trained model: perplexity by context length, RULER, a Markov baseline."""
