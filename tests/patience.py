"""How long tests wait for other processes: a hang ends a test, a slow machine does not."""

PATIENCE_S = 600.0
