"""Solvers: arrays in, a plan out. No part of a policy is imported here."""
