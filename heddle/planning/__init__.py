"""Plans of rollouts: engines, their roles, the size of the cluster, and files that start them."""
