"""Attention and recurrence ops with reference, XLA and Pallas implementations."""
