"""What a policy believes about cost: estimates, never the ground truth."""
