"""Stage two: a profile, one `from_` module for each source of measurements.

`curves` holds what all sources share. `kernel_tables` and `kernel_profile` serve kernel times;
`prompts`, `costs` and `loops` serve sweeps.
"""
