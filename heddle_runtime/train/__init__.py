"""A trainer in a process of its own, a task to learn, and the loop around both."""
