"""From an engine to a profile, and from a profile to its error, in three stages.

`measure` runs timed steps on engines and writes a sweep (`sweeps`). `fit` makes a profile of a
sweep, or of published kernel times. `check` compares finished runs with their simulation.
Only the package `heddle` imports this one.
"""
