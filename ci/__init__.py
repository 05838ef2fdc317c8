"""What continuous integration runs beyond pytest."""
