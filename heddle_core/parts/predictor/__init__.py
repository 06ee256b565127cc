"""Predictors: how many tokens a trajectory still has to make."""
