"""Profiles of any model from its `config.json`: a roofline over operators, calibrated on tables."""
