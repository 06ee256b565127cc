"""The RL loop above rollouts: which trajectories start, what makes a batch, when weights change."""
