"""RL loops: rollouts, rewards, training and weight updates under a regime."""
