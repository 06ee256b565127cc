"""A world made of SimPy: engines, tools and transfers in simulated time."""
