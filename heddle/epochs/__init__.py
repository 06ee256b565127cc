"""Batches of prompts of like length in training, by lengths that Heddle has written."""
