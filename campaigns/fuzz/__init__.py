"""Damaged inputs through the command line, in this process."""
