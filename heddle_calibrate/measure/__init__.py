"""Stage one: a sweep of engines, from the cells to measure to the trials that are found."""
