"""What holds the planner to account."""
