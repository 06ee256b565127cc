"""Measured steps of rollouts and trainings, as `heddle.observed/1`."""
