"""Fit the planner's constants and validate its memory and time models.

``fit`` fits the constants to published runs, ``memory`` compares the closed form of memory with the
planner's dry run, and ``step_time`` compares predicted with measured steps on an emulated cluster.
"""
