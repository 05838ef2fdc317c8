"""Wheels, source distributions and bill of materials of a release: ``python -m ci.wheels``."""
