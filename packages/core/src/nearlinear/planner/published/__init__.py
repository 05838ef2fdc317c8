"""Published training runs that the time model is fitted to and validated against."""
