"""How long tests wait for other processes: a hang ends a test, a slow machine does not."""

from campaigns.processes import PATIENCE_S as PATIENCE_S
