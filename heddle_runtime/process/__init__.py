"""An engine in a process of its own: the loop inside, the handle outside, and their messages."""
