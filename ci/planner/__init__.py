"""How the planner's parameters are made."""
