"""From an engine to a profile, and from a profile to its error, in three stages.

`measure` runs timed steps on engines and writes a sweep (`sweeps`). `fit` makes a profile of a
sweep, or of kernel times. `check` compares finished runs with their simulation, `serving` published
serving runs with profiles.
Only the packages `heddle` and `heddle_verl` import this one.
"""
